"""The number of decoded frames is the requested one, for every family that makes videos."""

from __future__ import annotations

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadSize
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from small_runs import opened, picture, prompts, sampled

SIZES = {"2b": (64, 48), "1.5": (64, 48), "1.5-i2v": (96, 64), "wan": (64, 48), "svd": (64, 64)}
FRAMES = {"2b": (1, 5, 13, 21), "1.5": (9, 13), "1.5-i2v": (5, 9), "wan": (5, 13), "svd": (2, 3)}
REQUESTS = [(model, frames) for model in FRAMES for frames in FRAMES[model]]


@pytest.mark.parametrize(("model", "frames"), REQUESTS)
def test_decode_returns_requested_number_of_frames(model, frames):
    handle = opened(model)
    latents, sampling = sampled(handle, (*SIZES[model], frames), steps=1)
    made, report = decode(handle, latents)
    assert len(made) == frames
    cut = [note for note in (*sampling.notes, *report.notes) if "frames are cut" in note]
    assert bool(cut) == (model not in ("svd", "wan") and (frames - 1) % 8 == 4), "a note says so if frames are cut"


@pytest.mark.parametrize("tiling", [False, True])
def test_frames_that_repeat_first_one_are_cut(tiling):
    """Of an even number of latents, CogVideoX's VAE makes as many frames of the first one as of the others."""
    handle = opened("2b")
    latents, _ = sampled(handle, (64, 48, 13), steps=1)
    vae = diffusers.AutoencoderKLCogVideoX.from_pretrained(handle.store.model.path / "vae")
    vae.use_tiling = tiling
    with torch.no_grad():
        whole = (vae.decode(latents).sample[0].permute(1, 2, 3, 0) * 0.5 + 0.5).clamp(0, 1)
    made, _ = decode(handle, latents, tiling=tiling)
    assert len(whole) == 16 and torch.equal(made, whole[3:]), "one frame of the first latent, four of each other"


@pytest.mark.parametrize(("model", "frames"), [("2b", 5), ("1.5", 9), ("1.5", 13)])
def test_video_to_video_keeps_number_of_frames(model, frames):
    handle, (width, height) = opened(model), SIZES[model]
    video = [picture(width, height, seed) for seed in range(frames)]
    settings = SampleSettings(width, height, steps=1, seed=3, frames=frames, strength=1.0)
    positive, negative = prompts(handle)
    latents, _ = sample(handle, positive, negative, settings, video=video)
    assert len(decode(handle, latents)[0]) == frames


def test_number_of_frames_must_fit_temporal_scale_of_vae(monkeypatch):
    """diffusers' Wan would round down, with a line in the log."""
    handle = opened("wan")
    monkeypatch.setitem(handle.store.model.vae_config, "scale_factor_temporal", 8)
    with pytest.raises(BadSize, match=r"frames is 13, but .* 8·k \+ 1"):
        sampled(handle, (64, 48, 13))


USELESS = {"2b": {"chunk"}, "svd": {"tiling", "slicing"}, "cogview3": set[str](), "wan": {"chunk"}}  # VAE settings


@pytest.mark.parametrize("model", USELESS)
def test_setting_that_vae_does_not_support_gives_warning(model):
    handle = opened(model)
    layout, config = handle.family.layout, handle.store.model.vae_config
    sizes = {4: (2, layout.channels(config), 8, 8), 5: (1, layout.channels(config), 2, 8, 8)}
    latents = torch.randn(sizes[layout.dimensions], generator=torch.Generator().manual_seed(0))
    whole, _ = decode(handle, latents)
    for setting in ("chunk", "tiling", "slicing"):
        made, report = decode(handle, latents, **{setting: 1})
        warnings = [line for line in report.warnings if line.startswith(f"'{setting}' has no effect")]
        assert bool(warnings) == (setting in USELESS[model])
        assert not warnings or torch.equal(made, whole)
