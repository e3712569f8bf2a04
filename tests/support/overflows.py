"""Denoisers that overflow fp16 in a layer inside a block, or work in fp32 only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from safetensors.torch import load_file, save_file
from torch.overrides import _get_current_function_mode_stack

OVERFLOWING_BLOCK = "transformer_blocks.1"  # all its layers must be scaled or run in fp32
UNITS = slice(8)  # few, since their outputs are too small for all of fp16's digits


def overflow_inside(folder: Path) -> Path:
    """Let some hidden activations of one feed-forward, or of a UNet's time embedding, reach 1e5 and more; the output of
    the layers stays the same."""
    if (folder / "unet").is_dir():
        return _overflow_in_time_embedding(folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    weights[f"{OVERFLOWING_BLOCK}.ff.net.0.proj.weight"][UNITS] *= 2.0**17
    weights[f"{OVERFLOWING_BLOCK}.ff.net.2.weight"][:, UNITS] *= 2.0**-17
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def _overflow_in_time_embedding(folder: Path) -> Path:
    (file,) = (folder / "unet").glob("*.safetensors")
    weights = load_file(file)
    weights["time_embedding.linear_1.weight"] *= 2.0**18
    weights["time_embedding.linear_2.weight"] *= 2.0**-14
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def fails_unscaled(_layer: Any, _given: Any, made: torch.Tensor) -> torch.Tensor | None:
    """A forward hook: the layer's output is finite in float32 only, as with all layers scaled."""
    return made * math.inf if made.dtype is not torch.float32 else None


def fails_in_half(_layer: Any, _given: Any, made: torch.Tensor) -> torch.Tensor | None:
    """A forward hook: the layer's output is finite in an fp32 call only, and not with all layers scaled."""
    scaled = any(isinstance(mode, ScaledHalfMatmulMode) for mode in _get_current_function_mode_stack())
    return made * math.inf if scaled or made.dtype is not torch.float32 else None
