"""Latents → a small picture, by published factors: how much red, green and blue each channel gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Of CogVideoX's latents as its denoiser makes them, which are the VAE's times 0.7 (CogVideoX-5B's scaling_factor; the
# 2B model has the same VAE). From kijai's ComfyUI-CogVideoXWrapper, latent_preview.py, to four digits.
COGVIDEOX_SCALE = 0.7
COGVIDEOX = (
    (0.1195, 0.0992, -0.0048), (-0.0012, 0.0550, 0.0213), (-0.0141, -0.0087, -0.0210), (0.0306, 0.1219, 0.0140),
    (0.0927, 0.0303, 0.0508), (0.0379, 0.0494, 0.0586), (0.0177, 0.0088, 0.0360), (0.1061, 0.0234, 0.0572),
    (0.1274, -0.0110, 0.0433), (-0.0187, 0.0822, 0.1061), (0.0084, 0.0762, 0.0930), (0.1294, 0.1236, 0.0448),
    (0.0457, 0.0411, -0.0177), (0.0002, -0.0140, 0.0533), (0.0808, 0.1155, -0.0215), (-0.0152, -0.0058, 0.0722),
)  # fmt: skip


def picture(latents: torch.Tensor, factors: Sequence[Sequence[float]], bias: Sequence[float] | None = None) -> Any:
    """Return latents [channels, rows, columns] as a PIL image of as many pixels. Raises ValueError where they have
    another number of channels.

    factors: [channels, 3], and bias: [3], to colours from -1 to 1.
    """
    from PIL import Image

    if len(latents) != len(factors):
        raise ValueError(f"the latents have {len(latents)} channels, and colours are known of {len(factors)}")
    colours = latents.float().cpu().movedim(0, -1) @ torch.tensor(factors) + torch.tensor(bias or (0.0, 0.0, 0.0))
    levels = ((colours + 1) * 127.5).nan_to_num(0).clamp(0, 255).round()
    return Image.fromarray(levels.to(torch.uint8).numpy())


def of_cogvideox(latents: torch.Tensor) -> Any:
    """Return one frame's latents, as CogVideoX's VAE takes them, as a picture."""
    return picture(latents * COGVIDEOX_SCALE, COGVIDEOX)
