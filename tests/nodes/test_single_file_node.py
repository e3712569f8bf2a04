"""Stable Video Diffusion from ComfyUI's single file, through the nodes."""

from __future__ import annotations

import os
import shutil
from typing import Any

import diffusers
import pytest
import shared_models
import torch
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.nodes.load import LoadPipeline
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from safetensors.torch import save_file

IMAGE = torch.linspace(0, 1, 64 * 64 * 3).reshape(1, 64, 64, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Laid out as ComfyUI's folder of models."""
    root = tmp_path_factory.mktemp("models")
    (root / "checkpoints" / "video").mkdir(parents=True)
    shutil.copyfile(shared_models.svd_file(image=224, patch=56), root / "checkpoints" / "video" / "svd_xt.safetensors")
    tensor = {"cond_stage_model.transformer.text_model.x": torch.zeros(1)}
    tensor["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(1)
    save_file(tensor, root / "checkpoints" / "dreamshaper.safetensors")
    return root


@pytest.fixture(autouse=True)
def folders(models, tmp_path):
    with host.plain_folders(models=[models], input=tmp_path, output=tmp_path):
        yield


def load(precision="fp32", name="video/svd_xt.safetensors"):
    return call("LoadPipeline", model=name, precision=precision, backend="eager")["result"][0]


def sample(pipeline):
    inputs = {"image": IMAGE, "frames": 3, "steps": 2, "max_guidance_scale": 3.0, "seed": 5, "fit": "crop"}
    return GRAPHS["svd"].sample(pipeline, **inputs)["result"]


def test_single_file_run_is_bit_equal_to_diffusers():
    pipeline = load()
    latents, report = sample(pipeline)
    assert "SVD-XT" in report and "2 steps, all fine" in report
    frames = GRAPHS["svd"].decode(pipeline, latents)["result"][0]
    store = pipeline.store
    parts: dict[str, Any] = {name: store.module(name, "fp32") for name in ("unet", "vae", "image_encoder")}
    parts |= {name: store.unweighted(name) for name in ("scheduler", "feature_extractor")}
    by_hand = diffusers.StableVideoDiffusionPipeline(**parts)
    by_hand.set_progress_bar_config(disable=True)
    expected = by_hand(
        fitted(IMAGE, 64, 64, "crop")[0], width=64, height=64, num_frames=3, num_inference_steps=2,
        generator=torch.Generator().manual_seed(5), output_type="pt", max_guidance_scale=3.0,
    ).frames  # fmt: skip
    assert torch.equal(frames.permute(0, 3, 1, 2), expected[0])


def test_unsupported_or_missing_file_is_refused_by_name():
    with pytest.raises(BadFolder, match=r"'dreamshaper.safetensors' is not a Stable Video Diffusion checkpoint: "):
        load(name="dreamshaper.safetensors")
    with pytest.raises(BadFolder, match=r"'away.safetensors' was not found.*single file into models/checkpoints"):
        load(name="away.safetensors")


def test_rewritten_file_is_loaded_again(models):
    name = "video/svd_xt.safetensors"
    before, store = LoadPipeline.IS_CHANGED(model=name), load().store
    assert load().store is store
    os.utime(models / "checkpoints" / name, ns=(1, 1))
    assert LoadPipeline.IS_CHANGED(model=name) != before and load().store is not store


def test_doctor_plans_single_file_and_names_missing_one(models, capsys):
    file = models / "checkpoints" / "video" / "svd_xt.safetensors"
    assert cli.main(["doctor", "--model", str(file), "--verbose"]) == 0
    assert "Plan for svd_xt.safetensors: SVD-XT" in capsys.readouterr().out
    assert cli.main(["doctor", "--model", str(file.with_name("gone.safetensors"))]) == 2
    assert "There is no '" in capsys.readouterr().err
