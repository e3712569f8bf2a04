"""Fuzzing of model folders, single files and LoRAs: a damaged file is rejected with a message or valid.

Damaged are configs, indexes and headers, which libraries parse. Weights are not damaged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import diffusers
import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder, BadLora
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.models.folder import family_of, inspect
from comfyui_onediff_guard.pipelines.models.lora import check_lora
from comfyui_onediff_guard.pipelines.models.single_file import read_svd
from comfyui_onediff_guard.trust.message import for_terminal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_bytes, mutated_text
from safetensors.torch import load_file, save_file
from tiers import by_tier

SMALL = ("scheduler_config", "tokenizer_config", "special_tokens_map", "preprocessor_config", "config", "model_index")
OPTIONS: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "database": None}


@pytest.fixture(scope="module")
def folders(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies to damage; "shards" has two components split into shards."""
    root = tmp_path_factory.mktemp("damaged")
    made = {name: shared_models.copied(model_folder(name), root / name) for name in ("2b", "cogview4", "svd")}
    made["shards"] = shared_models.copied(model_folder("2b"), root / "shards")
    for name, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")):
        file = made["shards"] / name / f"{stem}.safetensors"
        tensors = list(load_file(file).items())
        file.unlink()
        parts = {f"{stem}-{n + 1:05}-of-00002.safetensors": dict(tensors[n::2]) for n in range(2)}
        for shard, held in parts.items():
            save_file(held, file.with_name(shard), metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {key: shard for shard, held in parts.items() for key in held}}
        file.with_name(f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return made


@pytest.fixture(scope="module")
def lora(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(LoRA file with settings in its header, its denoiser)"""
    with torch.device("meta"):
        denoiser: Any = diffusers.CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=8, num_layers=2)
    tensors = {}
    for block in range(2):
        for layer in ("attn1.to_q", "attn1.to_out.0"):
            tensors[f"transformer.transformer_blocks.{block}.{layer}.lora_A.weight"] = torch.zeros(4, 16)
            tensors[f"transformer.transformer_blocks.{block}.{layer}.lora_B.weight"] = torch.zeros(16, 4)
    tensors |= {f"lora_unet_transformer_blocks_1_ff_net_2.lora_{way}.weight": torch.zeros(s) for way, s in
                (("down", (2, 64)), ("up", (16, 2)))}  # fmt: skip
    written = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2, "^transformer_blocks.1.attn1.to_out.0": 1.5}}
    written |= {"use_rslora": False, "init_lora_weights": True, "target_modules": ["to_q"], "rank_pattern": {}}
    file = tmp_path_factory.mktemp("loras") / "lora.safetensors"
    save_file(tensors, file, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(written)})
    return file, denoiser


@contextmanager
def replaced_content(file: Path, data: bytes) -> Iterator[None]:
    """data: for a safetensors file only the header; hypothesis keeps its draws, and bodies would fill memory."""
    whole = file.read_bytes()
    body = header_and_body(file)[1] if file.suffix == ".safetensors" else b""
    file.write_bytes(data + body)
    try:
        yield
    finally:
        file.write_bytes(whole)


def check_message(refused: Exception) -> None:
    said = str(refused)
    assert len(said) < 2000 and for_terminal(said) == said


def header_and_body(file: Path) -> tuple[bytes, bytes]:
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    return whole[8:end], whole[end:]


@st.composite
def damaged_header(draw: st.DrawFn, file: Path) -> bytes:
    """A safetensors header with damaged values, settings, bytes or length."""
    text, _ = header_and_body(file)
    if draw(st.integers(0, 3)) == 0:
        return draw(mutated_bytes(len(text).to_bytes(8, "little") + text))
    header = json.loads(text)
    inner = header.get("__metadata__", {}).get("lora_adapter_metadata")
    if inner and draw(st.booleans()):
        header["__metadata__"]["lora_adapter_metadata"] = json.dumps(draw(mutated(json.loads(inner))))
    else:
        header = draw(mutated(header))
    changed = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(changed).to_bytes(8, "little") + changed


@st.composite
def damage(draw: st.DrawFn, folder: Path, most: int = 3) -> tuple[Path, bytes]:
    """(a file of the folder, its damaged content)"""
    files = sorted(path for path in folder.rglob("*") if path.stem in SMALL or ".safetensors" in path.name)
    file = files[draw(st.integers(0, len(files) - 1))]
    if file.suffix == ".safetensors":
        return file, draw(damaged_header(file))
    return file, draw(mutated_text(json.loads(file.read_text(encoding="utf-8")), most))


@settings(max_examples=by_tier(17_000, 90), **OPTIONS)
@given(data=st.data())
def test_damaged_folder_is_rejected_with_a_message_or_valid(folders: dict[str, Path], data: st.DataObject) -> None:
    folder = folders[data.draw(st.sampled_from(sorted(folders)))]
    family = family_of(folder)
    file, content = data.draw(damage(folder))
    with replaced_content(file, content):
        try:
            found = inspect(folder, family)
            assert found.weights.keys() == found.configs.keys() == set(family.weighted)
        except BadFolder as refused:
            check_message(refused)


@settings(max_examples=by_tier(7_500, 40), **OPTIONS)
@given(data=st.data())
def test_damaged_lora_is_rejected_with_a_message_or_valid(lora: tuple[Path, Any], data: st.DataObject) -> None:
    file, denoiser = lora
    with replaced_content(file, data.draw(damaged_header(file))):
        try:
            check_lora(file, COGVIDEOX, denoiser)
        except BadLora as refused:
            check_message(refused)


@pytest.fixture(scope="module")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copyfile(shared_models.svd_file(), tmp_path_factory.mktemp("single") / "svd.safetensors")


@settings(max_examples=by_tier(500, 20), **OPTIONS)
@given(data=st.data())
def test_damaged_single_file_is_rejected_with_a_message_or_valid(single_file: Path, data: st.DataObject) -> None:
    with replaced_content(single_file, data.draw(damaged_header(single_file))):
        try:
            assert read_svd(single_file).configs.keys() == {"unet", "vae", "image_encoder"}
        except BadFolder as refused:
            check_message(refused)


def loaded_from(folder: Path, name: str) -> str:
    """The outcome of checking a folder and loading a component. Fails if a weight is on meta or not the stored one."""
    family = family_of(folder)
    try:
        model = inspect(folder, family)
    except BadFolder:
        return "refused by the check"
    if name not in family.weighted:
        name = family.denoiser
    try:
        found = model.component(name, torch.float32).state_dict(keep_vars=True)
    except BadFolder:
        return "refused when loaded"
    stored = {key: tensor for part in model.weights[name].files for key, tensor in load_file(part).items()}
    tied = {id(found[key]) for key in found.keys() & stored.keys()}
    assert all(id(tensor) in tied and not tensor.is_meta for tensor in found.values())
    assert all(torch.equal(found[key], stored[key].float()) for key in found.keys() & stored.keys())
    return "loaded as stored"


@settings(max_examples=by_tier(300, 12), **OPTIONS)
@given(data=st.data())
def test_damaged_folder_loads_as_stored_or_is_rejected(folders: dict[str, Path], data: st.DataObject) -> None:
    folder = folders[data.draw(st.sampled_from(sorted(folders)))]
    file, content = data.draw(damage(folder, 1))
    with replaced_content(file, content), suppress(BadFolder):  # for a damaged model_index.json
        loaded_from(folder, file.parent.name)


def test_undamaged_folder_loads_as_stored(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        for component in ("text_encoder", "image_encoder", "transformer", "unet", "vae"):
            assert loaded_from(folder, component) == "loaded as stored", (name, component)
