"""A layer that leaves half precision's range at every step, and is right in fp32."""

from __future__ import annotations

import math

import torch
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules


class Faulty(torch.nn.Module):
    """Puts a NaN into a layer's half-precision output. A class of its own: a compiler tells it by that."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        if made.dtype != torch.float32:
            made[(-1,) * made.ndim] = math.nan  # of the picture's tokens, not the text's
        return made


def faulty(denoiser: torch.nn.Module, layer: str) -> torch.nn.Module:
    """A shell of the denoiser, which shares its weights, in which that layer fails."""
    return replace_submodules(denoiser, {layer: Faulty})
