"""A small T5 tokenizer, trained on the spot: its folder holds what a published one's does."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import T5Tokenizer

TEXT_LENGTH = 226  # tokens; what every CogVideoX is trained with
SENTINELS = 100  # T5's <extra_id_0..99>


def train_tokenizer(folder: Path) -> T5Tokenizer:
    """Train a sentencepiece unigram model, write it to `folder` in the published form, and load it as T5Tokenizer."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="unigram",
        vocab_size=200,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        eos_piece="</s>",
        unk_piece="<unk>",
        num_threads=1,
        minloglevel=2,
    )
    named: dict[str, Any] = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    named["additional_special_tokens"] = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    rest = {"extra_ids": SENTINELS, "legacy": True, "model_max_length": TEXT_LENGTH, "tokenizer_class": "T5Tokenizer"}
    folder.mkdir()
    (folder / "spiece.model").write_bytes(model.getvalue())
    write_json(folder / "special_tokens_map.json", named)
    write_json(folder / "tokenizer_config.json", {**named, **rest})
    return T5Tokenizer.from_pretrained(folder)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


SENTENCES = (
    "a slow river of colour moves through the night",
    "a red balloon floats over a quiet village at dawn",
    "waves roll onto a sandy beach under a golden sun",
    "a cat sleeps on a warm window sill while rain falls outside",
    "the camera glides between tall pine trees covered with snow",
    "a paper boat drifts down a narrow stream in the forest",
    "soft clouds turn pink and orange above the mountains",
    "a dancer turns in a wide hall filled with morning light",
    "green and violet aurora flows across a dark sky",
    "a small robot waters flowers in a sunny garden",
    "city lights blur behind a window of a moving train",
    "an astronaut walks over red dust towards a distant hill",
    "ink spreads in clear water and forms a blooming flower",
    "a dog runs along the shore and splashes through the water",
    "steam rises from a cup of coffee on a wooden table",
    "a lantern glows in the fog beside an old stone bridge",
    "jellyfish pulse gently in the deep blue ocean",
    "a field of wheat bends in the summer wind",
    "fireflies blink above the grass in the evening",
    "a close up of a blue eye that opens slowly",
    "a hummingbird hovers beside a bright yellow flower",
    "smoke curls and folds in a beam of white light",
    "a train crosses a high bridge over a misty valley",
    "rain drops race down the glass and the street shines",
    "an old sailor looks over the calm sea at sunset",
    "low quality, blurry, distorted, watermark, text, jpeg artifacts",
    "a panda plays the guitar by a quiet lake in a bamboo forest",
    "a time lapse of a rose that opens its petals",
    "a drone shot over a winding road along the cliffs",
    "colourful hot air balloons rise at sunrise over the valley",
    "a glass marble rolls over a polished table and stops",
    "leaves fall from a maple tree on a windy autumn day",
    "quick brown foxes jump over lazy dogs, 0 1 2 3 4 5 6 7 8 9",
    "The Video Shows A Very Detailed, Cinematic Scene; Best Quality!",
)
