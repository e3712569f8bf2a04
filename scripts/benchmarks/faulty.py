"""A layer that overflows half precision at every step, and is right in fp32."""

from __future__ import annotations

import math

import torch
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules


class Faulty(torch.nn.Module):
    """Puts a NaN into a layer's half-precision output. Its own class, so that a compiler can distinguish it."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        if made.dtype != torch.float32:
            made[(-1,) * made.ndim] = math.nan  # a token of the picture, not of the text
        return made


def faulty(denoiser: torch.nn.Module, layer: str) -> torch.nn.Module:
    """Return a shallow copy of the denoiser, with shared weights, in which this layer fails."""
    return replace_submodules(denoiser, {layer: Faulty})
