"""Lists of models and LoRAs in loaders: supported ones only, or where to put one."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import shared_models
import torch
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.pipelines.families.table import FAMILIES
from comfyui_onediff_guard.pipelines.models import folder as folders
from safetensors.torch import load_file, save_file

PIPELINES = {
    "text": "CogVideoXPipeline",
    "from-image": "CogVideoXImageToVideoPipeline",
    "three": "CogView3PlusPipeline",
    "four": "CogView4Pipeline",
    "wan": "WanPipeline",
    "video": "StableVideoDiffusionPipeline",
    "foreign": "FluxPipeline",
}


LOADER, LORA = (NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"] for name in ("LoadPipeline", "LoadLoRA"))


@pytest.fixture
def models(own_folder):
    for kind in ("diffusers", "checkpoints", "loras"):
        (own_folder / kind).mkdir()
    for name, pipeline in PIPELINES.items():
        write_index(own_folder / "diffusers" / name, json.dumps({"_class_name": pipeline}))
    write_index(own_folder / "diffusers" / "broken", "{")
    write_index(own_folder / "diffusers" / "list", "[]")
    write_index(own_folder / "diffusers" / "deep", "[" * 100_000)
    svd = shutil.copyfile(shared_models.svd_file(), own_folder / "checkpoints" / "svd_xt.safetensors")
    write_other_checkpoints(own_folder / "checkpoints", load_file(svd))
    return own_folder


def write_index(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "model_index.json").write_text(content, encoding="utf-8")


def write_other_checkpoints(folder: Path, svd: dict[str, torch.Tensor]) -> None:
    """Checkpoints of other models, and incomplete ones."""
    one = torch.zeros(1)
    save_file(svd | {"conditioner.embedders.1.encoder.x": one}, folder / "sv3d.safetensors")
    save_file({k: v for k, v in svd.items() if k.startswith("model.")}, folder / "unet.safetensors")
    save_file({"double_blocks.0.img_attn.norm.key_norm.scale": one}, folder / "flux.safetensors")
    (folder / "cut.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{")
    (folder / "empty.safetensors").write_bytes(b"")


def listed(loader=LOADER, key: str = "model") -> list[str]:
    return loader.INPUT_TYPES()["required"][key][0]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_names_that_look_like_html_are_not_listed(models):
    write_index(models / "diffusers" / "<img src=x onerror=run()>", json.dumps({"_class_name": PIPELINES["four"]}))
    for kind in ("checkpoints", "loras"):
        shutil.copy(models / "checkpoints" / "svd_xt.safetensors", models / kind / "<b>.safetensors")
    assert "<" not in str([LOADER.INPUT_TYPES(), LORA.INPUT_TYPES()])
    assert "<" not in str([host.model_folders(), host.weight_files("checkpoints"), host.weight_files("loras")])


def test_list_has_models_of_all_supported_families_and_no_others(models):
    own = sorted(PIPELINES.keys() - {"foreign"})
    assert listed() == [*own, "svd_xt.safetensors"] and {PIPELINES[name] for name in own} == set(FAMILIES)


def test_files_below_a_linked_folder_are_listed(models, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    shutil.copy(models / "checkpoints" / "svd_xt.safetensors", elsewhere / "mine.safetensors")
    (models / "loras" / "linked").symlink_to(elsewhere, target_is_directory=True)
    (elsewhere / "back").symlink_to(models / "loras", target_is_directory=True)
    (models / "loras" / "own").mkdir()
    (models / "loras" / "a link").symlink_to(models / "loras" / "own", target_is_directory=True)
    shutil.copy(elsewhere / "mine.safetensors", models / "loras" / "own" / "its.SAFETENSORS")
    assert listed(LORA, "lora") == ["a link/its.SAFETENSORS", "linked/mine.safetensors", "own/its.SAFETENSORS"]


def test_unsupported_or_missing_model_is_refused_by_name(models):
    with pytest.raises(BadFolder, match="holds a FluxPipeline"):
        LOADER().load("foreign", "fp32", "eager", "none")
    with pytest.raises(BadFolder, match=f"Model 'gone' was not found.* into {models}/diffusers .*Found: four, "):
        LOADER().load("gone", "fp32", "eager", "none")


def test_error_for_empty_list_names_unusable_folders(own_folder):
    """Such as an incomplete download, and models of other families."""
    for number in range(12):
        write_index(own_folder / f"other-{number:02}", json.dumps({"_class_name": "FluxPipeline"}))
    write_index(own_folder / "my-model", "")
    (only,) = listed()
    with pytest.raises(BadFolder) as refusal:
        LOADER().load(only, "fp32", "eager", "none")
    text = str(refusal.value)
    assert (
        text.startswith("No model is chosen. Put its folder") and "Found: none. Not listed, since they cannot" in text
    )
    assert "other families: my-model, other-00, " in text and text.endswith("other-10 and 1 more.")


def test_headers_are_read_once_until_a_file_changes(models, monkeypatch):
    file, read = models / "checkpoints" / "flux.safetensors", []
    original = folders.header_text  # not parsed, which would take seconds for a hundred checkpoints
    monkeypatch.setattr(folders, "header_text", lambda path: read.append(path.name) or original(path))
    folders._pipeline.cache_clear()
    listed()
    assert sorted(read) == sorted(path.name for path in (models / "checkpoints").iterdir())
    read.clear()
    listed()
    assert read == []
    os.utime(file, ns=(1, 1))
    listed()
    assert read == ["flux.safetensors"]


def test_empty_lists_say_where_to_put_files(own_folder):
    (only,), (none,) = listed(), listed(LORA, "lora")
    assert only == "none found: put one into models/diffusers or models/checkpoints, or fill in hub_id"
    assert none == "none found: put one into models/loras"
    for entry in (only, "none found: fill in hub_id"):  # as earlier versions wrote
        with pytest.raises(
            BadFolder, match=rf"^No model is chosen\. .* into {own_folder}.* into hub_id\. Found: none\.$"
        ):
            LOADER().load(entry, "fp32", "eager", "none", hub_id=" ")
    refused = f"No LoRA. Found: none. Looked in: {own_folder}. Put a .safetensors file there."
    assert str(LORA.VALIDATE_INPUTS(lora=none)) == refused


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="their file systems have no such names")
@pytest.mark.parametrize(
    "name", [b"\xff.json", b"\xff.safetensors", b"\xff", b"diffusion_pytorch_model-\xff.safetensors"]
)
@pytest.mark.parametrize("below", [b"", b"tokenizer", b"transformer"])
def test_model_with_file_name_that_is_not_utf8_loads(model_folder, own_folder, below, name):
    """As archives of other systems unpack to."""
    folder = shared_models.copied(model_folder(), own_folder / "model")
    (folder / os.fsdecode(below) / os.fsdecode(name)).write_text("{}")
    assert LOADER.listed() == ["model"] and LOADER.IS_CHANGED(model="model") != LOADER.IS_CHANGED(model="")
    (pipeline,) = LOADER().load("model", "fp32", "eager", "none")["result"]
    assert pipeline.store.unweighted("tokenizer")("a").input_ids


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="their file systems have no such names")
def test_folder_whose_name_is_not_utf8_is_not_listed(model_folder, own_folder):
    folder = shared_models.copied(model_folder(), own_folder / os.fsdecode(b"m\xff"))
    assert LOADER.listed() == [] and LOADER.IS_CHANGED(model=folder.name) == ""
    with pytest.raises(BadFolder, match="was not found"):
        LOADER().load(folder.name, "fp32", "eager", "none")
