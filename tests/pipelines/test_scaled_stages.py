"""Stages that run in fp16 with every layer scaled: text encoders and VAE encoders, right where plain fp16 is not."""

from __future__ import annotations

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.families.svd import SVD
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.run.stage import Calls
from comfyui_onediff_guard.pipelines.run.vae import guarded_encoder
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Component, Precision
from safetensors.torch import load_file, save_file


@pytest.fixture
def overflowing_svd(model_folder, tmp_path):
    """A folder whose VAE's encoder leaves fp16's range, as Stable Video Diffusion's does. Its weights are the same in
    fp16 and fp32."""
    folder = shared_models.copied(model_folder("svd"), tmp_path / "svd")
    (file,) = (folder / "vae").glob("*.safetensors")
    weights = {name: weight.half() for name, weight in load_file(file).items()}
    weights["encoder.conv_in.weight"] *= 2.0**18
    save_file({name: weight.float() for name, weight in weights.items()}, file, metadata={"format": "pt"})
    return folder


def encoded(folder, precision):
    """Moments of a picture, and the stage's report."""
    handle = load(
        folder, SVD, precision=Precision(precision), backend="eager", offload="none", placement=PlainPlacement()
    )
    pixels = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    stage = handle.stage(Component.VAE_ENCODE)
    shell, report = guarded_encoder(stage, Calls("encoding {} of {}", lambda *_: None)), stage.report
    with torch.no_grad():
        return shell.encode(pixels).latent_dist.parameters, report


def error(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_svds_vae_encoder_in_fp16_is_right_where_plain_fp16_is_nan(overflowing_svd):
    expected, _ = encoded(overflowing_svd, "fp32")
    plain, unguarded = encoded(overflowing_svd, "fp16 (plain)")
    assert not plain.isfinite().any() and unguarded.protection == ""
    found, report = encoded(overflowing_svd, "fp16")
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")]
    assert report.protection == "overflow protection" and "overflow protection; 1 part, fine" in report.summary()
    assert error(found, expected) < 2e-3
    assert encoded(overflowing_svd, "bf16")[1].protection == ""


def test_a_clamped_prompt_is_told_each_time(clamping_text_encoder, open_pipeline):
    handle = open_pipeline(clamping_text_encoder, "fp16 (plain)")
    reports = [encode_prompts(handle, ["a boat", ""])[1] for _ in range(2)]
    assert [report.failed for report in reports] == [2, 2]
