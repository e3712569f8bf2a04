"""Denoisers that leave fp16's range in a layer inside of a block, or are right in fp32 alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from safetensors.torch import load_file, save_file
from torch.overrides import _get_current_function_mode_stack

OVERFLOWING_BLOCK = "transformer_blocks.1"  # of which every layer has to be scaled, or run in fp32
UNITS = slice(8)  # few, since what they hand on is too small for fp16 to hold all its digits


def overflow_inside(folder: Path) -> Path:
    """Some hidden activations of one feed-forward reach 1e5 and more, or of a UNet's time embedding; what comes of them
    stays as it was."""
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
    """As a forward hook: what the layer puts out is right in float32 alone, as where every layer is scaled."""
    return made * math.inf if made.dtype is not torch.float32 else None


def fails_in_half(_layer: Any, _given: Any, made: torch.Tensor) -> torch.Tensor | None:
    """As a forward hook: what the layer puts out is right in fp32 alone, and not with every layer scaled."""
    scaled = any(isinstance(mode, ScaledHalfMatmulMode) for mode in _get_current_function_mode_stack())
    return made * math.inf if scaled or made.dtype is not torch.float32 else None
