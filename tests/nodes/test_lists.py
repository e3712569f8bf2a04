"""What loaders offer: models of their own family, or where to put one."""

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


@pytest.fixture
def models(tmp_path: Path):
    for kind in ("diffusers", "checkpoints", "loras"):
        (tmp_path / kind).mkdir()
    for name, pipeline in PIPELINES.items():
        index(tmp_path / "diffusers" / name, json.dumps({"_class_name": pipeline}))
    index(tmp_path / "diffusers" / "broken", "{")
    index(tmp_path / "diffusers" / "list", "[]")
    index(tmp_path / "diffusers" / "deep", "[" * 100_000)
    svd = shutil.copyfile(shared_models.svd_file(), tmp_path / "checkpoints" / "svd_xt.safetensors")
    others(tmp_path / "checkpoints", load_file(svd))
    with host.plain_folders(models=[tmp_path], input=tmp_path, output=tmp_path):
        yield tmp_path


def index(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "model_index.json").write_text(content, encoding="utf-8")


def others(folder: Path, svd: dict[str, torch.Tensor]) -> None:
    """Checkpoints that are no Stable Video Diffusion, or not all of it."""
    one = torch.zeros(1)
    save_file(svd | {"conditioner.embedders.1.encoder.x": one}, folder / "sv3d.safetensors")
    save_file({k: v for k, v in svd.items() if k.startswith("model.")}, folder / "unet.safetensors")
    save_file({"double_blocks.0.img_attn.norm.key_norm.scale": one}, folder / "flux.safetensors")
    (folder / "cut.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{")
    (folder / "empty.safetensors").write_bytes(b"")


def listed(name: str, key: str = "model") -> list[str]:
    return NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"].INPUT_TYPES()["required"][key][0]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_name_that_a_page_may_take_for_html_is_not_offered(models):
    index(models / "diffusers" / "<img src=x onerror=run()>", json.dumps({"_class_name": PIPELINES["four"]}))
    for kind in ("checkpoints", "loras"):
        shutil.copy(models / "checkpoints" / "svd_xt.safetensors", models / kind / "<b>.safetensors")
    assert "<" not in str(
        [NODE_CLASS_MAPPINGS[f"OneDiffGuard{loader}"].INPUT_TYPES() for loader in ("LoadPipeline", "LoadLoRA")]
    )
    assert "<" not in str([host.model_folders(), host.weight_files("checkpoints"), host.weight_files("loras")])


def test_the_list_has_models_of_every_family_of_ours_and_no_others(models):
    own = sorted(PIPELINES.keys() - {"foreign"})
    assert listed("LoadPipeline") == [*own, "svd_xt.safetensors"] and {PIPELINES[name] for name in own} == set(FAMILIES)


def test_files_below_a_linked_folder_are_listed(models, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    shutil.copy(models / "checkpoints" / "svd_xt.safetensors", elsewhere / "mine.safetensors")
    (models / "loras" / "linked").symlink_to(elsewhere, target_is_directory=True)
    (elsewhere / "back").symlink_to(models / "loras", target_is_directory=True)
    (models / "loras" / "own").mkdir()
    (models / "loras" / "a link").symlink_to(models / "loras" / "own", target_is_directory=True)
    shutil.copy(elsewhere / "mine.safetensors", models / "loras" / "own" / "its.SAFETENSORS")
    assert listed("LoadLoRA", "lora") == ["a link/its.SAFETENSORS", "linked/mine.safetensors", "own/its.SAFETENSORS"]


def test_another_familys_folder_that_a_file_names_is_explained(models):
    with pytest.raises(BadFolder, match="holds a FluxPipeline"):
        NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]().load("foreign", "fp32", "eager", "none")


def test_where_none_is_listed_what_is_there_is_named(tmp_path):
    """Such as a download that was cut off, and models of other families."""
    for number in range(12):
        index(tmp_path / f"other-{number:02}", json.dumps({"_class_name": "FluxPipeline"}))
    index(tmp_path / "my-model", "")
    with host.plain_folders(models=[tmp_path], input=tmp_path, output=tmp_path):
        (only,) = listed("LoadPipeline")
        with pytest.raises(BadFolder) as refusal:
            NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]().load(only, "fp32", "eager", "none")
    said = str(refusal.value)
    assert (
        said.startswith("No model is chosen. Put its folder") and "Found: none. Not listed, since they cannot" in said
    )
    assert "other families: my-model, other-00, " in said and said.endswith("other-10 and 1 more.")


def test_headers_are_read_once_until_a_file_changes(models, monkeypatch):
    file, read = models / "checkpoints" / "flux.safetensors", []
    original = folders.header_text  # not parsed: that takes seconds of a hundred checkpoints
    monkeypatch.setattr(folders, "header_text", lambda path: read.append(path.name) or original(path))
    folders._pipeline.cache_clear()
    listed("LoadPipeline")
    assert sorted(read) == sorted(path.name for path in (models / "checkpoints").iterdir())
    read.clear()
    listed("LoadPipeline")
    assert read == []
    os.utime(file, ns=(1, 1))
    listed("LoadPipeline")
    assert read == ["flux.safetensors"]


def test_no_list_is_empty(tmp_path):
    with host.plain_folders(models=[tmp_path], input=tmp_path, output=tmp_path):
        (only,) = listed("LoadPipeline")
        assert only.startswith("none found: put one into models/diffusers")
        assert listed("LoadLoRA", "lora") == ["none found: put one into models/loras"]
        lora = NODE_CLASS_MAPPINGS["OneDiffGuardLoadLoRA"]
        refused = str(lora.VALIDATE_INPUTS(lora=listed("LoadLoRA", "lora")[0]))
    assert refused == f"No LoRA. Found: none. Looked in: {tmp_path}. Put a .safetensors file there."


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="their file systems have no such names")
@pytest.mark.parametrize(
    "name", [b"\xff.json", b"\xff.safetensors", b"\xff", b"diffusion_pytorch_model-\xff.safetensors"]
)
@pytest.mark.parametrize("below", [b"", b"tokenizer", b"transformer"])
def test_a_file_whose_name_is_no_text_harms_nothing(model_folder, tmp_path, below, name):
    """As archives of other systems unpack them."""
    folder = shared_models.copied(model_folder(), tmp_path / "model")
    (folder / os.fsdecode(below) / os.fsdecode(name)).write_text("{}")
    loader = NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]
    with host.plain_folders(models=[tmp_path], input=tmp_path, output=tmp_path):
        assert loader.listed() == ["model"] and loader.IS_CHANGED(model="model") != loader.IS_CHANGED(model="")
        (pipeline,) = loader().load("model", "fp32", "eager", "none")["result"]
        assert pipeline.store.unweighted("tokenizer")("a").input_ids


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="their file systems have no such names")
def test_a_folder_whose_name_is_no_text_is_not_offered(model_folder, tmp_path):
    folder = shared_models.copied(model_folder(), tmp_path / os.fsdecode(b"m\xff"))
    loader = NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]
    with host.plain_folders(models=[tmp_path], input=tmp_path, output=tmp_path):
        assert loader.listed() == [] and loader.IS_CHANGED(model=folder.name) == ""
        with pytest.raises(BadFolder, match="was not found"):
            loader().load(folder.name, "fp32", "eager", "none")
