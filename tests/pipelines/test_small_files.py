"""Folders that a download or a copy left incomplete: refused by name, before a weight is read, or read as they are."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder, LibraryFailed
from comfyui_onediff_guard.pipelines.models import folder as folders
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from hostile import checked, say
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from transformers import PreTrainedTokenizerFast, T5TokenizerFast

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4096\n"
BOM = b"\xef\xbb\xbf"
T5 = ("2b", "cogview3", "wan")
SMALL = [
    *[(variant, f"tokenizer/{file}") for variant in T5 for file in ("spiece.model", "tokenizer_config.json")],
    *[("cogview4", f"tokenizer/{file}") for file in ("tokenizer.json", "tokenizer_config.json")],
    ("svd", "feature_extractor/preprocessor_config.json"),
    *[(variant, "scheduler/scheduler_config.json") for variant in (*T5, "cogview4", "svd")],
]
ALSO = [(variant, "tokenizer/special_tokens_map.json") for variant in (*T5, "cogview4")]
WEIGHTS = [("2b", "text_encoder/model.safetensors"), ("svd", "vae/diffusion_pytorch_model.safetensors")]
CONFIGS = [("2b", "model_index.json"), ("2b", "transformer/config.json"), ("svd", "image_encoder/config.json")]


@pytest.fixture(scope="module")
def damaged(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """damaged(variant) → a folder whose small files are one's own and whose weights are links."""

    def copy(variant: str) -> Path:
        target = tmp_path_factory.mktemp("damaged") / "model"

        def link(source: str, to: str) -> None:
            (os.symlink if source.endswith(".safetensors") else shutil.copy)(source, to)

        return shutil.copytree(model_folder(variant), target, copy_function=link)

    return copy


def put(file: Path, data: bytes | None) -> None:
    """None: nothing."""
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


def tokens(folder: Path) -> list[int]:
    return checked(folder).unweighted("tokenizer")("a red cat, ＡＢＣ and 42 dogs").input_ids


@pytest.mark.parametrize(("variant", "file"), [*SMALL, *ALSO, *WEIGHTS, *CONFIGS])
def test_what_is_missing_empty_cut_off_or_a_pointer_is_refused_by_name(
    damaged: Callable[[str], Path], variant: str, file: str
) -> None:
    folder = damaged(variant)
    whole = (folder / file).read_bytes()
    name = Path(file).name
    states = {b"": name, whole[: len(whole) // 2]: name, whole[:-3]: name}
    states[POINTER] = rf"{file}' is a Git LFS pointer \({len(POINTER)} bytes\), not the file: run `git lfs pull`"
    if (variant, file) not in ALSO:
        states[None] = name if not file.endswith(".safetensors") else "holds no .safetensors file"
    for data, said in states.items():
        put(folder / file, data)
        with pytest.raises(BadFolder, match=said):
            checked(folder)
    put(folder / file, whole)
    checked(folder)


def test_a_sentencepiece_model_cut_at_any_length_is_refused_or_makes_the_same_tokens(
    damaged: Callable[[str], Path],
) -> None:
    """Cut between two of its parts it is one that can be read, with fewer tokens or another way to split text."""
    folder = damaged("2b")
    file = folder / "tokenizer" / "spiece.model"
    whole, expected = file.read_bytes(), tokens(folder)
    model = sentencepiece_model_pb2.ModelProto.FromString(whole)
    model.ClearField("normalizer_spec")
    with_trainer = model.ByteSize()
    model.ClearField("trainer_spec")
    pieces = model.ByteSize()
    del model.pieces[-40:]
    refused = 0
    for length in (1, model.ByteSize(), pieces - 1, pieces, with_trainer, with_trainer + 9, len(whole) - 1, len(whole)):
        put(file, whole[:length])
        try:
            assert tokens(folder) == expected and length == len(whole)
        except BadFolder as error:
            refused += "tokenizer/spiece.model' cannot be used: it is no sentencepiece model, or cut off" in str(error)
    assert refused == 7


def other_sizes(folder: Path) -> None:
    say(folder / "text_encoder" / "config.json", vocab_size=256)
    file = folder / "text_encoder" / "model.safetensors"
    cut = {key: tensor[:256].clone() if len(tensor) == 384 else tensor for key, tensor in load_file(file).items()}
    file.unlink()
    save_file(cut, file, metadata={"format": "pt"})


def few_tokens(folder: Path) -> None:
    file = folder / "tokenizer" / "spiece.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    del model.pieces[60:]
    file.write_bytes(model.SerializeToString())
    say(folder / "tokenizer" / "tokenizer_config.json", extra_ids=0, additional_special_tokens=[])
    say(folder / "tokenizer" / "special_tokens_map.json", additional_special_tokens=[])


def other_letters(folder: Path) -> None:
    """As many tokens as before, none of them of the letters that people write prompts with."""
    file = folder / "tokenizer" / "spiece.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    for n, piece in enumerate(model.pieces[3:]):
        piece.piece = "▁" if n == 0 else chr(0x4E00 + n)
    file.write_bytes(model.SerializeToString())


def two_vocabularies(folder: Path) -> None:
    T5TokenizerFast.from_pretrained(folder / "tokenizer").save_pretrained(folder / "fast")
    other_letters(folder)
    shutil.copy(folder / "fast" / "tokenizer.json", folder / "tokenizer")


def another_end(folder: Path) -> None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        say(folder / "tokenizer" / file, eos_token="[SEP]")


MISFITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "larger than the encoder": (other_sizes, "has 300 tokens, and the encoder's embedding 256 rows"),
    "smaller than the encoder": (few_tokens, "has 60 tokens, and the encoder's embedding 384 rows"),
    "unknown tokens only": (other_letters, "makes the same or no tokens of"),
    "two that differ": (two_vocabularies, "holds two vocabularies: spiece.model and tokenizer.json"),
    "other special tokens": (another_end, "its eos_token has the id 300, and 1 by the encoder's config.json"),
    "of another class": (
        lambda folder: say(folder / "tokenizer" / "tokenizer_config.json", tokenizer_class="BertTokenizer"),
        "tokenizer_config.json' cannot be used: it is of a BertTokenizer, and model_index.json names T5Tokenizer",
    ),
    "no vocabulary in it": (
        lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text('{"model": {"vocab": {}}}'),
        "tokenizer/tokenizer.json' cannot be used: it holds no vocabulary",
    ),
    "many more tokens": (
        lambda folder: (folder / "tokenizer" / "added_tokens.json").write_text(
            json.dumps({f"<{n}>": 300 + n for n in range(100_000)})
        ),
        r"tokenizer/added_tokens.json' has [\d,]+ bytes, and 1,048,576 is the most",
    ),
    "a nameless schedule": (
        lambda folder: (folder / "scheduler" / "scheduler_config.json").write_text("{}"),
        "scheduler_config.json' cannot be used: it names no '_class_name'",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_files_that_are_whole_and_do_not_fit_each_other_are_refused(
    damaged: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Before a weight is read."""
    folder = damaged("2b")
    change, said = MISFITS[what]
    change(folder)
    monkeypatch.setattr(diffusers.ModelMixin, "from_pretrained", None)
    with pytest.raises(BadFolder, match=said):
        checked(folder)


def test_a_vocabulary_of_another_family_is_refused(
    damaged: Callable[[str], Path], model_folder: Callable[..., Path]
) -> None:
    folder = damaged("2b")
    shutil.copy(model_folder("cogview4") / "tokenizer" / "tokenizer.json", folder / "tokenizer")
    with pytest.raises(BadFolder, match="'model/tokenizer"):
        checked(folder)
    folder = damaged("cogview4")
    T5TokenizerFast.from_pretrained(model_folder("2b") / "tokenizer").save_pretrained(folder / "other")
    shutil.copy(folder / "other" / "tokenizer.json", folder / "tokenizer" / "tokenizer.json")
    with pytest.raises(BadFolder, match="'model/tokenizer' does not fit the text encoder"):
        checked(folder)


@pytest.mark.parametrize("variant", ["2b", "wan"])
def test_published_layouts_of_files_load_and_make_the_same_tokens(
    damaged: Callable[[str], Path], variant: str, tmp_path: Path
) -> None:
    """Of the older library, spiece.model alone; of the newer one, tokenizer.json alone; Wan's have both."""
    folder = damaged(variant)
    tokenizer, expected = folder / "tokenizer", tokens(folder)
    put(tokenizer / "added_tokens.json", json.dumps({f"<extra_id_{n}>": 299 - n for n in range(100)}).encode())
    assert tokens(folder) == expected
    T5TokenizerFast.from_pretrained(tokenizer).save_pretrained(tmp_path / "fast")
    shutil.copy(tmp_path / "fast" / "tokenizer.json", tokenizer)
    assert tokens(folder) == expected
    put(tokenizer / "spiece.model", None)
    assert tokens(folder) == expected
    shutil.rmtree(tokenizer)
    shutil.copytree(tmp_path / "fast", tokenizer)
    assert tokens(folder) == expected


def test_a_glm_tokenizer_that_the_library_saved_again_loads(damaged: Callable[[str], Path]) -> None:
    folder = damaged("cogview4")
    expected = tokens(folder)
    loaded = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    shutil.rmtree(folder / "tokenizer")
    loaded.save_pretrained(folder / "tokenizer")
    assert tokens(folder) == expected


def test_files_that_no_component_needs_are_not_read(damaged: Callable[[str], Path]) -> None:
    folder = damaged("2b")
    expected = tokens(folder)
    (folder / "tokenizer" / "additional_chat_templates").mkdir()
    for file in ("chat_template.jinja", "additional_chat_templates/a.jinja", "vocab.json", "tokenizer.model"):
        (folder / "tokenizer" / file).touch()
        os.truncate(folder / "tokenizer" / file, 8 * 2**40)  # more than any machine can read
    say(folder / "tokenizer" / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])
    (folder / "tokenizer" / "tokenizer.4.0.0.json").write_text("{}")
    assert tokens(folder) == expected


@pytest.mark.parametrize("variant", ["2b", "cogview4", "svd"])
def test_a_byte_order_mark_is_read_over_in_every_config(damaged: Callable[[str], Path], variant: str) -> None:
    folder = damaged(variant)
    before = checked(folder)
    for file in folder.rglob("*.json"):
        put(file, BOM + file.read_bytes())
    found = checked(folder)
    for name, spec in found.family.components.items():
        if spec.weights:
            one, other = (model.component(name, torch.float32) for model in (before, found))
            assert type(one) is type(other) is spec.class_named(found.classes[name])
            state = other.state_dict()
            assert all(torch.equal(tensor, state[key]) for key, tensor in one.state_dict().items())
            assert (
                one.config.to_dict() == other.config.to_dict()
                if spec.library == "transformers"
                else (dict(one.config) == dict(other.config))
            )
        elif name != "tokenizer":
            one, other = (model.unweighted(name) for model in (before, found))
            assert str(one) == str(other)


def test_a_byte_order_mark_in_an_index_of_shards_is_named(damaged: Callable[[str], Path]) -> None:
    folder = damaged("2b") / "vae"
    (file,) = folder.glob("*.safetensors")
    index = file.with_name("diffusion_pytorch_model.safetensors.index.json")
    listed = {"metadata": {}, "weight_map": dict.fromkeys(load_file(file), file.name)}
    index.write_bytes(BOM + json.dumps(listed).encode())
    with pytest.raises(BadFolder, match=r"index.json' begins with a byte order mark.*Save it as UTF-8 without"):
        checked(folder.parent)


def test_two_prompts_are_never_the_same_to_the_model_unsaid(damaged: Callable[[str], Path]) -> None:
    """A whole tokenizer may know no word of a prompt either: that is said."""
    folder = damaged("2b")
    handle = load(
        folder, family_of(folder), precision=Precision("fp32"), backend="eager", offload="none",
        placement=PlainPlacement(),
    )  # fmt: skip
    (cat, dog), known = encode_prompts(handle, ["a red cat", "a blue dog"])
    assert not torch.equal(cat, dog)
    (one, other), report = encode_prompts(handle, ["一只红色的猫", "两只狗在跑"])
    assert torch.equal(one, other)
    said = [note for note in report.notes if note not in known.notes]
    assert [note.rpartition(": ")[2] for note in said] == ["一只红色的猫", "两只狗在跑"]


# --- what is no file's fault ------------------------------------------------------------------------------------------


def test_a_library_that_cannot_be_imported_is_no_files_fault(
    damaged: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers, where Python was started with PYTHONOPTIMIZE=2: it reads docstrings."""
    folder = damaged("2b")

    def cannot(_module: Any, _name: str) -> None:
        raise ValueError("No `Args` section is found in the docstring of `Seq2SeqModelOutput`")

    folders._built.cache_clear()
    library = sys.modules["transformers"]
    monkeypatch.delattr(library, "T5EncoderModel", raising=False)
    monkeypatch.setattr(type(library), "__getattr__", cannot)
    with pytest.raises(
        LibraryFailed, match=r"^transformers cannot be imported \(ValueError: No `Args`.*requirements"
    ) as told:
        checked(folder)
    assert isinstance(told.value.__cause__, ValueError)


def test_a_class_that_builds_of_no_config_is_no_files_fault(
    damaged: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged("2b")

    def broken(self: Any, **_: Any) -> None:
        raise TypeError("of another version")

    folders._built.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(diffusers.AutoencoderKLCogVideoX, "__init__", broken)
        with pytest.raises(
            LibraryFailed, match=r"No AutoencoderKLCogVideoX can be built here.*of another version"
        ) as told:
            checked(folder)
    assert isinstance(told.value.__cause__, TypeError)
    say(folder / "vae" / "config.json", norm_num_groups=7)
    with pytest.raises(BadFolder, match=r"no Autoencod\w+ can be built from its config.json") as told:
        checked(folder)
    assert told.value.__cause__ is not None
