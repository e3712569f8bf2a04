"""Folders that are incomplete, damaged, of another model, or malicious: refused before weights are read."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder, LibraryFailed
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW4
from comfyui_onediff_guard.pipelines.families.spec import ComponentSpec
from comfyui_onediff_guard.pipelines.models import folder as folders
from comfyui_onediff_guard.pipelines.small_files import fields_of
from hostile import checked, file_of, put, rewrite, say
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from transformers import T5TokenizerFast

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4096\n"
STEM = "diffusion_pytorch_model"
WEIGHTS, SHARDS = f"transformer/{STEM}.safetensors", f"{STEM}.safetensors.index.json"
ENCODER, DENOISER, VAE = "text_encoder/config.json", "transformer/config.json", "vae/config.json"
WORDS, SCHEDULE = "tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"
T5 = ("2b", "cogview3", "wan")


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


REFUSED: list[tuple[str, str, Any, str]] = [  # variant, file, its new content, message
    # of another model
    ("2b", "model_index.json", {"_class_name": "WanPipeline"}, "names T5EncoderModel as text_encoder"),
    ("2b", "model_index.json", {"_class_name": "FluxPipeline"}, "holds a FluxPipeline. Supported: Cog"),
    ("2b", "model_index.json", {"_class_name": ["CogVideoXPipeline"]}, "holds a .'CogVideoXPipeline'."),
    ("2b", "model_index.json", {"transformer": ["diffusers", "UNet2DModel"]}, "names UNet2DModel as transformer"),
    ("2b", DENOISER, {"_class_name": "UNet2DModel"}, "its '_class_name' is UNet2DModel, but model_index.json names"),
    ("2b", WORDS, {"tokenizer_class": "BertTokenizer"}, "it is for BertTokenizer, but model_index.json names T5"),
    # no JSON, no config
    ("2b", "model_index.json", b"<html>", "it is not JSON"),
    ("2b", "model_index.json", [], r"it holds \[\], expected an object"),
    ("2b", SCHEDULE, b"{}", "it names no '_class_name'"),
    # vocabularies
    ("2b", "tokenizer/tokenizer.json", {"model": {"vocab": {}}}, "tokenizer.json' cannot be used: it holds no vocab"),
    ("2b", "tokenizer/tokenizer.json", {"model": {"vocab": [["a", 0]] * (2**20 + 1)}}, "are a list of 1048577"),
    ("2b", "tokenizer/tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [{}] * 10**6}, "a list of 10000"),
    ("2b", "tokenizer/added_tokens.json", {f"{n}": n for n in range(20_000)}, "its tokens are an object of 20000"),
    # weights
    ("2b", WEIGHTS, f"{STEM}.bin", f"'model/transformer' has no {STEM}.safetensors. It holds .*{STEM}.bin.*refused"),
    ("2b", WEIGHTS, "model.pt", "holds config.json, model.pt. .*are refused"),
    ("2b", WEIGHTS, f"{STEM}.fp16.safetensors", "holds config.json, .*fp16.safetensors. .*Rename a variant"),
    ("2b", WEIGHTS, b"<!DOCTYPE html><html>404</html>" * 10, "it has 310 bytes"),
    ("2b", WEIGHTS, header("[]"), "it has 10 bytes .*expected struct"),
    ("2b", WEIGHTS, header('{"weight": "F16"}'), "expected struct TensorInfo"),
    ("2b", WEIGHTS, header('{"weight": {"data_offsets": 3}}'), "expected a tuple"),
    *[("2b", f"transformer/{SHARDS}", content, "index.json' cannot be used: ") for content in (
        [], [1], b'{"weight_map": ["a"]}', b'{"metadata": {}, "weight_map": {"a": 3}}', b"{}")],
    ("2b", f"transformer/{SHARDS}", {"metadata": {}, "weight_map": {"a": "b.safetensors"}}, "names b.safet"),
    *[("2b", "text_encoder/" + name, b"{}", "from which transformers would load other weights")
      for name in ("adapter_config.json", "shard-00001-model-00001-of-00001.safetensors")],
    # sizes
    ("2b", DENOISER, {"num_attention_heads": 8}, r"has the shape \[.*\], but \[.*\] in a model of this size"),
    ("2b", DENOISER, {"num_layers": 10**9}, "its 'num_layers' is 1000000000, expected a whole number .* most 256"),
    ("2b", DENOISER, {"num_layers": "<img src=x>"}, "its 'num_layers' is <img src=x>"),
    ("2b", DENOISER, {"sample_height": "8"}, "its 'sample_height' is 8, expected a whole number"),
    ("2b", DENOISER, {"num_attention_heads": -4}, "its 'num_attention_heads' is -4"),
    ("2b", DENOISER, {"num_attention_heads": [[[[4]]]]}, "its 'num_attention_heads' is"),
    ("2b", DENOISER, {"in_channels": {"a": 1}}, "its 'in_channels' is"),
    ("2b", DENOISER, {"patch_bias": 1}, "its 'patch_bias' is 1, expected true or false"),
    ("2b", DENOISER, {"activation_fn": "a/b"}, "its 'activation_fn' is a/b, expected a name"),
    ("2b", DENOISER, {"norm_eps": 1e-400}, "its 'norm_eps' is 0.0, expected a number above 0"),
    ("2b", DENOISER, dict.fromkeys(("sample_height", "sample_width", "sample_frames"), 4096), "embeddings alone take"),
    ("2b", ENCODER, {"vocab_size": 2**40}, "its 'vocab_size' is 1099511627776"),
    ("2b", ENCODER, {"num_layers": True}, "its 'num_layers' is True"),
    ("2b", ENCODER, {"feed_forward_proj": "a" * 99}, "its 'feed_forward_proj' is aaa"),
    ("2b", VAE, {"block_out_channels": [8] * 99}, "its 'block_out_channels' is a list of 99"),
    ("2b", VAE, {"layers_per_block": 10**6}, "its 'layers_per_block' is 1000000"),
    ("2b", VAE, {"scaling_factor": 0.0}, "its 'scaling_factor' is 0.0"),
    ("2b", VAE, {"temporal_compression_ratio": 0.5}, "temporal_compression_ratio' is 0.5, expected a whole number"),
    ("2b", VAE, {"scaling_factor": None}, "its 'scaling_factor' is None, expected a number above 0"),
    ("2b", VAE, {"scaling_factor": [0.5]}, r"its 'scaling_factor' is \[0.5\], expected a number above 0"),
    ("2b", VAE, {"invert_scale_latents": None}, "its 'invert_scale_latents' is None, expected true or false"),
    ("cogview4", VAE, {"shift_factor": True}, "its 'shift_factor' is True, expected a number of at least"),
    ("cogview4", VAE, {"latents_mean": 0.5}, "its 'latents_mean' is 0.5, expected a list, with each value a number"),
    ("cogview4", DENOISER, {"rope_axes_dim": [8]}, r"its 'rope_axes_dim' is \[8\], expected a list of 2, with each"),
    ("wan", DENOISER, {"eps": None}, "its 'eps' is None"),
    ("svd", "unet/config.json", {"num_frames": 25.0}, "its 'num_frames' is 25.0, expected a whole number"),
    ("svd", "unet/config.json", {"sample_size": "x"}, "its 'sample_size' is x, expected a whole number"),
    ("2b", WORDS, {"extra_ids": -1}, "its 'extra_ids' is -1, expected a whole number of at least 0"),
    ("2b", SCHEDULE, {"beta_schedule": None}, "its 'beta_schedule' is None, expected a name"),
    ("svd", "feature_extractor/preprocessor_config.json", {"do_resize": 3}, "its 'do_resize' is 3, expected true or"),
    ("2b", VAE, {"norm_num_groups": 7}, "no AutoencoderKLCogVideoX can be built from its config.json"),
    ("cogview4", ENCODER, {"rope_parameters": {"factor": "a b"}}, "its 'factor' is a b"),
    ("svd", "unet/config.json", {"transformer_layers_per_block": 10**6}, "its 'transformer_layers_per_block'"),
    ("svd", "image_encoder/config.json", {"image_size": 10**6}, "its 'image_size' is 1000000"),
    ("2b", WORDS, {"extra_ids": 10**9}, "its 'extra_ids' is 1000000000"),
    ("2b", SCHEDULE, {"num_train_timesteps": 10**9}, "its 'num_train_timesteps' is 1000000000"),
    ("2b", SCHEDULE, {"beta_start": "x"}, "its 'beta_start' is x, expected a number above 0"),
    ("svd", "feature_extractor/preprocessor_config.json", {"crop_size": {"height": 10**9}}, "its 'height' is 1000"),
    *[("2b", file, {f"field_{n}": n for n in range(100_000)}, "it is larger than 1,048,576 bytes")
      for file in ("model_index.json", VAE, "tokenizer/added_tokens.json")],
    # references to something outside the folder
    ("2b", ENCODER, {"_attn_implementation": "someone/kernel"}, "its '_attn_implementation' is someone/kernel, which"),
    ("2b", DENOISER, {"attn_implementation": "someone/kernel:fast"}, "its 'attn_implementation' is someone"),
    ("2b", VAE, {"attn_implementation": {"": "someone/kernel"}}, "its 'attn_implementation' is"),
    ("2b", ENCODER, {"_attn_implementation_internal": "paged|someone/kernel"}, "its '_attn_implementation_int"),
    ("2b", ENCODER, {"attn_implementation": "flash_attention_2"}, "its 'attn_implementation' is flash"),
    ("2b", ENCODER, {"_experts_implementation": "grouped_mm"}, "its '_experts_implementation' is"),
    ("2b", DENOISER, {"quantization_config": {"quant_method": "bitsandbytes"}}, "its 'quantization_config' is"),
    ("2b", DENOISER, {"compression_config": {"format": "dense"}}, "its 'compression_config' is"),
    ("2b", ENCODER, {"text_config": [{"kernel_config": {"RMSNorm": "x"}}]}, "its 'text_config.kernel_config' is"),
    ("2b", ENCODER, {"a": {"use_kernels": True}}, "its 'a.use_kernels' is True"),
    ("2b", VAE, {"fusion_config": {"patch_embeddings": True}}, "its 'fusion_config' is"),
    ("2b", ENCODER, {"transformers_weights": "other.safetensors"}, "its 'transformers_weights' is"),
    ("2b", DENOISER, {"_use_default_values": ["num_layers"]}, "its '_use_default_values' is"),
    ("2b", WORDS, {"vocab_file": "/etc/passwd"}, "its 'vocab_file' is /etc/passwd"),
    ("2b", WORDS, {"tokenizer_file": "../x.json"}, "its 'tokenizer_file' is ../x.json"),
    ("2b", WORDS, {"sp_model_kwargs": {"model_file": "/x"}}, "its 'sp_model_kwargs' is"),
    ("2b", WORDS, {"init_inputs": ["/etc/passwd"]}, "its 'init_inputs' is"),
    ("2b", "tokenizer/special_tokens_map.json", {"vocab_file": "/etc/passwd"}, "its 'vocab_file' is /etc/passwd"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[1]}-{case[3][:40]}")
def test_invalid_file_is_refused_by_name_before_weights_are_read(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, Any, str]
) -> None:
    variant, file, content, message = case
    folder = copy(variant)
    put(folder / file, content)
    monkeypatch.setattr(diffusers.ModelMixin, "from_pretrained", None)
    with pytest.raises(BadFolder, match=message) as refused:
        checked(folder)
    assert str(refused.value).startswith("'model")


NEEDED = [
    *[(variant, f"tokenizer/{file}") for variant in T5 for file in ("spiece.model", "tokenizer_config.json")],
    *[("cogview4", f"tokenizer/{file}") for file in ("tokenizer.json", "tokenizer_config.json")],
    ("svd", "feature_extractor/preprocessor_config.json"),
    *[(variant, SCHEDULE) for variant in (*T5, "cogview4", "svd")],
    ("2b", "text_encoder/model.safetensors"),
    ("svd", "vae/diffusion_pytorch_model.safetensors"),
    ("2b", "model_index.json"),
    ("2b", DENOISER),
    ("svd", "image_encoder/config.json"),
]
OPTIONAL = [(variant, "tokenizer/special_tokens_map.json") for variant in (*T5, "cogview4")]


@pytest.mark.parametrize(("variant", "file"), [*NEEDED, *OPTIONAL])
def test_missing_truncated_or_special_file_is_refused_by_name(
    copy: Callable[[str], Path], variant: str, file: str
) -> None:
    folder = copy(variant)
    whole, name = (folder / file).read_bytes(), Path(file).name
    states = {b"": name, whole[: len(whole) // 2]: name, whole[:-3]: name}
    states[POINTER] = rf"{file}' cannot be used: it is a Git LFS pointer \({len(POINTER)} bytes\), not the file"
    for data, message in states.items():
        put(folder / file, data)
        with pytest.raises(BadFolder, match=message):
            checked(folder)
    put(folder / file, None)
    if (variant, file) in NEEDED:
        with pytest.raises(BadFolder, match=name):
            checked(folder)
    os.mkfifo(folder / file)
    with pytest.raises(BadFolder, match=name):
        checked(folder)
    put(folder / file, None)
    put(folder / file, whole)
    checked(folder)


@pytest.mark.parametrize("name", ["tokenizer", "text_encoder", "transformer", "vae", "scheduler"])
def test_a_missing_component_is_named(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("2b")
    shutil.rmtree(folder / name)
    with pytest.raises(BadFolder, match=f"'model(/{name}' has no|' has no {name}/)"):
        checked(folder)


# --- what the files hold, and what the component is made of -----------------------------------------------------------


@pytest.mark.parametrize("component", [
    *[(variant, name) for variant in ("2b", "cogview4", "wan") for name in ("text_encoder", "transformer", "vae")],
    *[("svd", name) for name in ("image_encoder", "unet", "vae")],
])  # fmt: skip
def test_missing_unexpected_and_misshapen_tensors_are_refused_by_name(
    copy: Callable[[str], Path], component: tuple[str, str]
) -> None:
    variant, name = component
    folder = copy(variant)
    whole = file_of(folder, name).read_bytes()
    key = max(load_file(file_of(folder, name)))
    changes: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
        f"its files lack .*'{key}'": lambda tensors: tensors.pop(key),
        "its files hold 'evil', which a .* does not have": lambda tensors: tensors.update(evil=torch.zeros(3)),
        rf"'{key}' has the shape \[7, 3\], but \[.*\] in": lambda tensors: tensors.update({key: torch.zeros(7, 3)}),
        f"'{key}' is stored as I8, and quantised": lambda it: it.update({key: it[key].to(torch.int8)}),
    }
    for message, change in changes.items():
        rewrite(folder, name, change)
        with pytest.raises(BadFolder, match=f"'model/{name}': {message}"):
            checked(folder)
        file_of(folder, name).write_bytes(whole)


@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae"])
def test_tensors_removed_after_check_are_not_replaced_by_random_ones(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("2b")
    model = checked(folder)
    rewrite(folder, name, lambda tensors: tensors.pop(max(tensors)))
    with pytest.raises(BadFolder, match=f"'model/{name}' was loaded without . of its tensors, such as"):
        model.component(name, torch.float32)


def shard(folder: Path, name: str, stem: str, *, change: float = 0, files: tuple[str, ...] = ("a", "b")) -> Path:
    """Write a component's tensors, `change` added, into shards next to what is there. Returns their index."""
    tensors = load_file(file_of(folder, name))
    held = {file: dict(list(tensors.items())[n :: len(files)]) for n, file in enumerate(files)}
    for file, part in held.items():
        save_file({key: tensor + change for key, tensor in part.items()}, folder / name / f"{file}.safetensors")
    listed = {key: f"{file}.safetensors" for file, part in held.items() for key in part}
    index = folder / name / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}), encoding="utf-8")
    return index


@pytest.mark.parametrize(
    ("name", "stem", "read"), [("transformer", STEM, 1), ("vae", STEM, 1), ("text_encoder", "model", 0)]
)
def test_checked_files_are_those_that_library_loads(
    copy: Callable[[str], Path], name: str, stem: str, read: float
) -> None:
    """diffusers takes the index, transformers the single file."""
    folder = copy("2b")
    single = load_file(file_of(folder, name))
    shard(folder, name, stem, change=1)
    model = checked(folder)
    loaded = model.component(name, torch.float32).state_dict()
    assert all(torch.equal(loaded[key], tensor + read) for key, tensor in single.items())
    assert len(model.weights[name].files) == 1 + read
    (folder / name / f"{stem}.safetensors").unlink()
    assert len(checked(folder).weights[name].files) == 2


@pytest.mark.parametrize("name", [
    *("evil.bin", "evil.pkl", "../vae/diffusion_pytorch_model.safetensors", "/etc/x.safetensors", "..", ""),
    *("a\\b.safetensors", "C:x.safetensors", "x.safetensors.bin", "a\0.safetensors"),
])  # fmt: skip
def test_shards_must_be_safetensors_next_to_their_index(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("2b")
    index = shard(folder, "transformer", STEM, files=("a",))
    (folder / "transformer" / "evil.bin").write_bytes(b"\x80\x04.")
    listed = json.loads(index.read_text())["weight_map"]
    say(index, weight_map={**listed, max(listed): name})
    with pytest.raises(BadFolder, match=r"index.json' names '.*', which is not a safetensors file beside it"):
        checked(folder)


def test_index_of_other_shards_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("2b")
    index = shard(folder, "transformer", STEM)
    listed = json.loads(index.read_text())["weight_map"]
    key, other = max(listed), {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    for shards in ({**listed, key: other[listed[key]]}, {name: file for name, file in listed.items() if name != key}):
        say(index, weight_map=shards)
        with pytest.raises(BadFolder, match=f"does not fit the files beside it: index and files differ on '{key}'"):
            checked(folder)
    say(index, weight_map=listed)
    shutil.copy(folder / "transformer" / "a.safetensors", folder / "transformer" / "b.safetensors")
    with pytest.raises(BadFolder, match="does not fit the files beside it"):
        checked(folder)


# --- vocabularies -----------------------------------------------------------------------------------------------------


def model_of(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change a sentencepiece model."""
    file = folder / "tokenizer" / "spiece.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    change(model)
    file.write_bytes(model.SerializeToString())


def other_sizes(folder: Path) -> None:
    say(folder / ENCODER, vocab_size=256)
    rewrite(
        folder, "text_encoder", lambda all_: all_.update({k: t[:256].clone() for k, t in all_.items() if len(t) == 384})
    )


def few_tokens(folder: Path) -> None:
    model_of(folder, lambda model: model.pieces.__delitem__(slice(60, None)))
    say(folder / WORDS, extra_ids=0, additional_special_tokens=[])
    say(folder / "tokenizer" / "special_tokens_map.json", additional_special_tokens=[])


def other_letters(folder: Path) -> None:
    """As many tokens as before, but none with the letters of usual prompts."""

    def change(model: Any) -> None:
        for n, piece in enumerate(model.pieces[3:]):
            piece.piece = "▁" if n == 0 else chr(0x4E00 + n)

    model_of(folder, change)


def another_end(folder: Path) -> None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        say(folder / "tokenizer" / file, eos_token="[SEP]")


def two_vocabularies(folder: Path) -> None:
    T5TokenizerFast.from_pretrained(folder / "tokenizer").save_pretrained(folder / "fast")
    other_letters(folder)
    shutil.copy(folder / "fast" / "tokenizer.json", folder / "tokenizer")


MISFITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "larger than the encoder": (other_sizes, "has 300 tokens, but the encoder's embedding has 256 rows"),
    "smaller than the encoder": (few_tokens, "has 60 tokens, but the encoder's embedding has 384 rows"),
    "two that differ": (two_vocabularies, "holds two vocabularies: spiece.model and tokenizer.json"),
    "unknown tokens only": (other_letters, "give the same tokens, or none"),
    "other special tokens": (another_end, "its eos_token has the id 300, but the encoder's config.json says 1"),
    "a huge one": (lambda f: os.truncate(f / "tokenizer/spiece.model", 2**30), "it is larger than 67,108,864 bytes"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_vocabulary_that_does_not_fit_the_encoder_is_refused(copy: Callable[[str], Path], case: str) -> None:
    folder = copy("2b")
    change, message = MISFITS[case]
    change(folder)
    with pytest.raises(BadFolder, match=f"'model/tokenizer.*{message}"):
        checked(folder)


def test_a_vocabulary_of_another_family_is_refused(
    copy: Callable[[str], Path], model_folder: Callable[..., Path]
) -> None:
    folder = copy("cogview4")
    T5TokenizerFast.from_pretrained(model_folder("2b") / "tokenizer").save_pretrained(folder / "other")
    shutil.copy(folder / "other" / "tokenizer.json", folder / "tokenizer" / "tokenizer.json")
    with pytest.raises(BadFolder, match="'model/tokenizer' does not fit the text encoder"):
        checked(folder)


def test_a_sentencepiece_model_cut_between_its_parts_is_refused(copy: Callable[[str], Path]) -> None:
    """Such a file can be parsed, with fewer tokens or another way to split text."""
    folder = copy("2b")
    file = folder / "tokenizer" / "spiece.model"
    whole = file.read_bytes()
    model = sentencepiece_model_pb2.ModelProto.FromString(whole)
    lengths = []
    for field in ("normalizer_spec", "trainer_spec"):
        model.ClearField(field)
        lengths.append(model.ByteSize())
    del model.pieces[-40:]
    for length in (1, model.ByteSize(), lengths[1] - 1, *lengths, lengths[0] + 9, len(whole) - 1):
        put(file, whole[:length])
        with pytest.raises(
            BadFolder, match=r"spiece.model' cannot be used: it is not a sentencepiece model, or is cut off"
        ):
            checked(folder)


# --- errors that no file causes ---------------------------------------------------------------------------------------


def test_failing_import_of_library_is_not_blamed_on_file(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of transformers under PYTHONOPTIMIZE=2, since it reads docstrings."""
    folder = copy("2b")
    folders._built.cache_clear()
    library = sys.modules["transformers"]
    cannot = Mock(side_effect=ValueError("No `Args` section is found in the docstring of `Seq2SeqModelOutput`"))
    monkeypatch.delattr(library, "T5EncoderModel", raising=False)
    monkeypatch.setattr(type(library), "__getattr__", cannot)
    with pytest.raises(
        LibraryFailed, match=r"^transformers cannot be imported \(ValueError: No `Args`.*requirements"
    ) as error:
        checked(folder)
    assert isinstance(error.value.__cause__, ValueError)


def test_class_that_cannot_be_built_is_not_blamed_on_file(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy("2b")

    def broken(self: Any, **_: Any) -> None:
        raise TypeError("of another version")

    folders._built.cache_clear()
    monkeypatch.setattr(diffusers.AutoencoderKLCogVideoX, "__init__", broken)
    with pytest.raises(LibraryFailed, match=r"No AutoencoderKLCogVideoX can be built here.*another version") as error:
        checked(folder)
    assert isinstance(error.value.__cause__, TypeError)


@pytest.mark.parametrize("default", [None, 7, [7, 8]])
@pytest.mark.parametrize("value", [None, 7, [7, 8], -1])
def test_token_may_be_one_or_several_for_any_default_of_library(
    default: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GlmModel's default eos_token_id is a list in transformers 4, and None in transformers 5."""
    monkeypatch.setattr(ComponentSpec, "defaults", lambda *_: {"eos_token_id": default})
    assert fields_of(COGVIEW4.components["text_encoder"], "GlmModel", {"eos_token_id": value}) == {
        "eos_token_id": value
    }
