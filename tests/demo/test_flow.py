"""The weights set by formula do what they say: a blur, a v-prediction, smooth and moving colours."""

from __future__ import annotations

from typing import Any

import pytest
import shared_models
import torch
from comfyui_onediff_guard.demo import flow_denoiser
from comfyui_onediff_guard.demo.small_model import build_cogvideox
from diffusers import CogVideoXPipeline

FIELDS = flow_denoiser.FIELDS


@pytest.fixture(scope="module")
def pipeline() -> Any:
    folder = shared_models.built(build_cogvideox, variant="2b", look="flow", overflow="stream")
    loaded = CogVideoXPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def noise() -> torch.Tensor:
    return torch.randn(1, 5, 16, 12, 20, generator=torch.Generator().manual_seed(3))


def predict(pipeline: Any, noisy: torch.Tensor, timestep: int) -> torch.Tensor:
    """The clean latents that the denoiser's v stands for, only the channels that carry the picture."""
    text = torch.zeros(1, 226, pipeline.transformer.config.text_embed_dim)
    with torch.inference_mode():
        v = pipeline.transformer(noisy, text, torch.tensor([timestep]), return_dict=False)[0]
    alpha, sigma = (level[timestep].float() for level in flow_denoiser.noise_levels(pipeline.scheduler))
    return (alpha * noisy - sigma * v)[:, :, :FIELDS]


def roughness(images: torch.Tensor) -> torch.Tensor:
    return (images[..., 1:] - images[..., :-1]).abs().mean()


def sample(pipeline: Any, prompt: str, noise: torch.Tensor, **options: Any) -> torch.Tensor:
    frames = (noise.shape[1] - 1) * 4 + 1
    size = {"num_frames": frames, "height": noise.shape[3] * 8, "width": noise.shape[4] * 8}
    return pipeline(prompt, latents=noise.clone(), **size, num_inference_steps=8, **options).frames


def test_from_noise_it_predicts_a_blur_of_unit_size(pipeline: Any, noise: torch.Tensor) -> None:
    clean = predict(pipeline, noise, 999)
    assert clean.std().item() == pytest.approx(1.0, abs=0.35)
    assert roughness(clean) < 0.3 * roughness(noise)
    assert clean.mean((0, 1, 3, 4)).abs().max() < 0.2


def test_videos_are_smooth_colourful_and_move_evenly(pipeline: Any, noise: torch.Tensor) -> None:
    video = sample(pipeline, "a slow river", noise, output_type="pt")[0]
    assert video.std() > 0.15
    assert video.std(dim=1).mean() > 0.08, "colours, not greys"
    assert roughness(video) < 0.03
    motion = video.diff(dim=0).abs().mean((1, 2, 3))
    assert motion.min() > 0.003
    assert motion.max() < 4 * motion.median(), "no jump between the VAE's chunks"


def test_the_seed_decides_the_video_and_the_prompt_its_colours(pipeline: Any, noise: torch.Tensor) -> None:
    one, same, other = (
        sample(pipeline, prompt, noise, output_type="latent")[:, :, :FIELDS] for prompt in ("a cat", "a cat", "fire")
    )
    assert torch.equal(one, same)
    shift = (other - one).mean((0, 1, 3, 4), keepdim=True)
    assert shift.abs().max() > 0.02
    assert (other - one - shift).abs().max() < 0.1
    elsewhere = sample(pipeline, "a cat", noise.flip(4), output_type="latent")[:, :, :FIELDS]
    assert (elsewhere - one).abs().mean() > 0.3


def test_the_stream_stays_small_where_no_overflow_is_asked_for(noise: torch.Tensor) -> None:
    folder = shared_models.built(build_cogvideox, variant="2b", look="flow", overflow="none")
    half = CogVideoXPipeline.from_pretrained(folder, torch_dtype=torch.float16)
    half.set_progress_bar_config(disable=True)
    assert sample(half, "a cat", noise[:, :1].half(), output_type="pt").isfinite().all()
