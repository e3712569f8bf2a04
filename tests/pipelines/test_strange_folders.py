"""Folders with unusual layouts: loaded as they are stored, and only from files that were checked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from hostile import checked, file_of, put, rewrite, say
from safetensors.torch import load_file
from small_runs import opened
from transformers import PreTrainedTokenizerFast, T5TokenizerFast

BOM = b"\xef\xbb\xbf"


def tokens(folder: Path) -> list[int]:
    return checked(folder).unweighted("tokenizer")("a red cat, ＡＢＣ and 42 dogs").input_ids


def older_t5(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    tensors["decoder.final_layer_norm.weight"] = torch.ones(32)


def encoder_only_t5(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")


def older_clip(tensors: dict[str, torch.Tensor]) -> None:
    tensors["vision_model.embeddings.position_ids"] = torch.arange(257)[None]


def older_vae(tensors: dict[str, torch.Tensor]) -> None:
    for new, old in {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}.items():
        for key in [key for key in tensors if f"encoder.mid_block.attentions.0.{new}." in key]:
            tensors[key.replace(f".{new}.", f".{old}.")] = tensors.pop(key)


OLDER = [
    *(("2b", "text_encoder", change) for change in (older_t5, encoder_only_t5)),
    *(("svd", "image_encoder", older_clip), ("svd", "vae", older_vae)),
]


@pytest.mark.parametrize(("variant", "name", "change"), OLDER)
def test_tensors_with_names_of_older_versions_load_as_stored(
    copy: Callable[[str], Path], variant: str, name: str, change: Callable[..., None]
) -> None:
    folder = copy(variant)
    before = load_file(file_of(folder, name))
    assert rewrite(folder, name, change).keys() != before.keys()
    loaded = checked(folder).component(name, torch.float32).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", ["text_encoder", "transformer"])
@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation_autoset": True, "attn_implementation": None, "_attn_implementation": "eager"},
        {"_attn_implementation": "sdpa", "quantization_config": None, "use_kernels": False, "per_layer_config": {}},
        {"auto_map": {"AutoModel": "model.Evil"}, "architectures": ["Evil"], "torch_dtype": "evil"},
        {"_commit_hash": "x", "model_type": "evil", "name_or_path": "/etc", "tp_plan": "evil", "made_up": [{"x": {}}]},
    ],
)
def test_harmless_or_unused_fields_change_nothing(
    copy: Callable[[str], Path], name: str, fields: dict[str, Any]
) -> None:
    folder = copy("2b")
    expected = checked(folder).component(name, torch.float32).state_dict()
    say(folder / name / "config.json", **fields)
    module: Any = checked(folder).component(name, torch.float32)
    assert type(module).__name__ in ("T5EncoderModel", "CogVideoXTransformer3DModel")
    assert not hasattr(module.config, "made_up")
    found = module.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_published_tokenizer_with_paths_of_its_author_loads(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    theirs = {"special_tokens_map_file": "of/its/author/special_tokens_map.json", "tokenizer_file": None}
    theirs |= {"sp_model_kwargs": {}, "model_max_length": 10**30, "extra_ids": 100}
    say(folder / "tokenizer" / "tokenizer_config.json", **theirs)
    assert checked(folder).unweighted("tokenizer")("a cat").input_ids


@pytest.mark.parametrize("variant", ["2b", "wan"])
def test_all_published_layouts_of_tokenizer_make_same_tokens(
    copy: Callable[[str], Path], variant: str, tmp_path: Path
) -> None:
    """Older libraries write only spiece.model, newer ones only tokenizer.json. Wan's folders have both."""
    folder = copy(variant)
    tokenizer, expected = folder / "tokenizer", tokens(folder)
    put(tokenizer / "added_tokens.json", {f"<extra_id_{n}>": 299 - n for n in range(100)})
    assert tokens(folder) == expected
    T5TokenizerFast.from_pretrained(tokenizer).save_pretrained(tmp_path / "fast")
    shutil.copy(tmp_path / "fast" / "tokenizer.json", tokenizer)
    assert tokens(folder) == expected
    put(tokenizer / "spiece.model", None)
    assert tokens(folder) == expected
    shutil.rmtree(tokenizer)
    shutil.copytree(tmp_path / "fast", tokenizer)
    assert tokens(folder) == expected


def test_glm_tokenizer_saved_again_by_library_makes_same_tokens(copy: Callable[[str], Path]) -> None:
    folder = copy("cogview4")
    expected = tokens(folder)
    loaded = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    shutil.rmtree(folder / "tokenizer")
    loaded.save_pretrained(folder / "tokenizer")
    assert tokens(folder) == expected


def test_files_that_no_component_needs_are_not_read(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    expected = tokens(folder)
    (folder / "tokenizer" / "additional_chat_templates").mkdir()
    for file in ("chat_template.jinja", "additional_chat_templates/a.jinja", "vocab.json", "tokenizer.model"):
        (folder / "tokenizer" / file).touch()
        os.truncate(folder / "tokenizer" / file, 8 * 2**40)  # more than any machine can read
    say(folder / "tokenizer" / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])
    (folder / "tokenizer" / "tokenizer.4.0.0.json").write_text("{}")
    assert tokens(folder) == expected


@pytest.mark.parametrize("variant", ["2b", "svd"])
def test_byte_order_mark_is_ignored_in_every_config(copy: Callable[[str], Path], variant: str) -> None:
    folder = copy(variant)
    before = checked(folder)
    for file in folder.rglob("*.json"):
        put(file, BOM + file.read_bytes())
    found = checked(folder)
    for name, spec in found.family.components.items():
        if spec.weights:
            one, other = (model.component(name, torch.float32) for model in (before, found))
            assert str(one.config) == str(other.config)
        elif name != "tokenizer":
            assert str(before.unweighted(name)) == str(found.unweighted(name))


def test_links_of_hub_cache_and_users_are_followed(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """The target of a link is checked as any file is."""
    folder = copy("2b")
    storage = tmp_path / "models--owner--name"
    snapshot = storage / "snapshots" / ("0" * 40)
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link, blob = snapshot / file.relative_to(folder), storage / "blobs" / f"{number:064}"
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    assert checked(snapshot).component("vae", torch.float32) is not None
    weights = file_of(folder, "transformer")
    shutil.move(weights, elsewhere := tmp_path / "on-another-disk")
    weights.symlink_to(elsewhere)
    assert checked(folder).component("transformer", torch.float32) is not None
    elsewhere.write_bytes(b"pickled")
    with pytest.raises(BadFolder, match=r"transformer/.*safetensors' cannot be used: it has 7 bytes"):
        checked(folder)


def test_some_unknown_fields_are_named_in_notes(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    for name in ("vae", "transformer"):
        say(folder / name / "config.json", **{f"field_{n}": n for n in range(1000)})
    notes = [note for note in checked(folder).notes if "ignores" in note]
    assert [note.partition(" has fields that diffusers")[0] for note in notes] == [
        "transformer: config.json",
        "vae: config.json",
    ]
    assert all("field_0" in note for note in notes) and len("".join(notes)) < 500


def test_prompts_without_known_words_are_noted() -> None:
    """Such prompts look the same to the model. Even a complete tokenizer may know no word of a prompt."""
    handle = opened("2b")
    (cat, dog), known = encode_prompts(handle, ["a red cat", "a blue dog"])
    assert not torch.equal(cat, dog)
    (one, other), report = encode_prompts(handle, ["一只红色的猫", "两只狗在跑"])
    assert torch.equal(one, other)
    added = [note for note in report.notes if note not in known.notes]
    assert [note.rpartition(": ")[2] for note in added] == ["一只红色的猫", "两只狗在跑"]
