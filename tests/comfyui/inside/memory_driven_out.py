"""Runs in which each component that ComfyUI places drives out the others: with --disable-smart-memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory import decode, encode_prompts, opened, sampling
from PIL import Image

SIZES = {"2b": (32, 32, 5), "5b-i2v": (96, 64, 9), "svd": (64, 64, 2)}


@pytest.mark.parametrize("model", SIZES)
def test_a_component_is_on_the_card_when_it_is_called(tmp_path: Path, model: str) -> None:
    """Else it raises."""
    width, height, frames = SIZES[model]
    handle = opened(model, tmp_path)
    positive, negative = encode_prompts(handle, ["a kite", "grey"])[0] if handle.family.prompt else (None, None)
    image = Image.new("RGB", (width, height), "grey") if handle.family.takes_image else None
    settings = sampling.SampleSettings(width, height, steps=2, seed=1, frames=frames, guidance_scale=5.0)
    latents, _ = sampling.sample(handle, positive, negative, settings, image=image)
    assert decode(handle, latents)[0].isfinite().all()
