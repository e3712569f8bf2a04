"""A VAE that fails in one chunk or tile: only that one is recomputed in fp32, with its cache for the next chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.stage import Calls
from comfyui_onediff_guard.pipelines.run.vae import guarded_encoder
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.policy import Component
from small_runs import opened

FRAMES = 25  # decoded in 3 chunks


@pytest.fixture
def latents():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, 16, (FRAMES - 1) // 4 + 1, 2, 4, generator=generator)


def break_calls(monkeypatch, module, calls, change):
    """Change the half-precision output of `module` in these calls, counted from 0 over both precisions. Calls on
    "meta", which estimate memory, do not count."""
    forward, count = module.forward, iter(range(10**6))

    def broken(*args, **kwargs):
        output = forward(*args, **kwargs)
        made = output[0] if isinstance(output, tuple) else output
        half = not made.is_meta and next(count) in calls and made.dtype == torch.bfloat16
        return change(output) if half else output

    monkeypatch.setattr(module, "forward", broken)


def nan_in_output(output):
    return (output[0] * torch.nan, *output[1:]) if isinstance(output, tuple) else output * torch.nan


def infinite_cache(output):
    frames, cache = output
    return frames, {"mid_block": {**cache["mid_block"], "resnet_0": torch.full((2,), torch.inf)}} | {
        name: value for name, value in cache.items() if name != "mid_block"
    }


def silent():
    return Calls("encoding {} of {}", lambda *_: None)


def outcomes(report):
    return [step.outcome for step in report.steps]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_only_failing_chunk_is_recomputed_in_fp32(monkeypatch, latents, failing):
    expected, _ = decode(opened("2b"), latents)
    handle = opened("2b", precision="bf16")
    healthy, report = decode(handle, latents)
    assert outcomes(report) == ["finite"] * 3
    decoder = handle.store.module("vae", "bf16").decoder
    break_calls(monkeypatch, decoder.conv_out, {failing}, nan_in_output)
    frames, report = decode(handle, latents)
    assert outcomes(report) == ["rerun" if chunk == failing else "finite" for chunk in range(3)]
    assert report.steps[failing].stage == "vae_decode" and "NaN or infinite in bf16" in report.steps[failing].note
    assert (frames - expected).abs().max() < 1.5 * (healthy - expected).abs().max()
    edges = [0, 9, 17, 25]
    part = slice(edges[failing], edges[failing + 1])
    assert (frames[part] - expected[part]).abs().mean() < (healthy[part] - expected[part]).abs().mean()


def test_chunk_with_infinite_cache_is_recomputed(monkeypatch, latents):
    expected, _ = decode(opened("2b"), latents)
    handle = opened("2b", precision="bf16")
    break_calls(monkeypatch, handle.store.module("vae", "bf16").decoder, {1}, infinite_cache)
    frames, report = decode(handle, latents)
    assert outcomes(report) == ["finite", "rerun", "finite"], "the next chunk gets a good cache, cast to bf16"
    assert (frames - expected).abs().max() < 0.1


def test_only_failing_tile_is_recomputed_in_fp32(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 16, 1, 10, 16, generator=generator)
    handle = opened("2b", precision="bf16")
    healthy, report = decode(handle, latents, tiling=True)
    tiles = len(report.steps)
    assert tiles > 2 and report.reruns == 0
    break_calls(monkeypatch, handle.store.module("vae", "bf16").decoder.conv_out, {2}, nan_in_output)
    frames, report = decode(handle, latents, tiling=True)
    assert [step for step, outcome in enumerate(outcomes(report)) if outcome == "rerun"] == [2]
    assert len(report.steps) == tiles and (frames - healthy).abs().max() < 0.1


def test_only_failing_chunk_is_recomputed_when_encoding_video(monkeypatch):
    video = torch.rand(1, 3, FRAMES, 16, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    exact = opened("2b").stage(Component.VAE_ENCODE)
    expected = guarded_encoder(exact, silent()).encode(video).latent_dist.mode()
    handle = opened("2b", precision="bf16")
    encoder = handle.store.module("vae", "bf16").encoder
    break_calls(monkeypatch, encoder.conv_out, {1}, nan_in_output)
    stage = handle.stage(Component.VAE_ENCODE)
    guarded, report = guarded_encoder(stage, silent()), stage.report
    with torch.no_grad():
        found = guarded.encode(video).latent_dist.mode()
    assert outcomes(report) == ["finite", "rerun", "finite"] and report.steps[1].stage == "vae_encode"
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() / expected.abs().max() < 0.1


def test_scope_learned_scales_all_layers_after_failing_block(monkeypatch, latents):
    handle = opened("2b", precision="bf16")
    handle = replace(handle, policy=GuardPolicy(scope=Scope.LEARNED))
    block = handle.store.module("vae", "bf16").decoder.up_blocks[1]
    break_calls(monkeypatch, block, set(range(100)), nan_in_output)
    frames, report = decode(handle, latents)
    assert outcomes(report) == ["rerun", "finite", "finite"] and torch.isfinite(frames).all()
    rerun = report.steps[0].rerun
    assert rerun and rerun.module == "up_blocks.1" and rerun.action == "overflow protection from here on"
    unlearned, report = decode(replace(handle, policy=GuardPolicy(scope=Scope.STEP)), latents)
    assert outcomes(report) == ["rerun"] * 3 and torch.isfinite(unlearned).all()
