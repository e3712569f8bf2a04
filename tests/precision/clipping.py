"""Modules that clip fp16 overflows, each in a different way, and a guard for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import guards
import torch
from comfyui_onediff_guard.precision.guard import StageGuard
from comfyui_onediff_guard.precision.overflow_detection import ClipDetector
from torch import nn

END = 65504.0
Clip = Callable[[torch.Tensor], torch.Tensor]


def clip_as_t5(x: torch.Tensor) -> torch.Tensor:
    limit = torch.where(torch.isinf(x).any(), END - 1000, END)
    return torch.clamp(x, min=-limit, max=limit)


def clip_if_infinite(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-END + 1000, END - 1000) if torch.isinf(x).any() else x


def zero_nonfinite(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[~torch.isfinite(x)] = 0
    return x


CLIPS: dict[str, Clip] = {
    "where isfinite": lambda x: torch.where(torch.isfinite(x), x, 0),
    "where isfinite of a helper": lambda x: torch.where(x.isfinite(), x, torch.zeros_like(x)),
    "masked_fill isinf": lambda x: x.masked_fill(torch.isinf(x), 0.0),
    "masked_fill isnan and isinf": lambda x: x.masked_fill(x.isinf() | x.isnan(), END),
    "indexed": zero_nonfinite,
    "isposinf": lambda x: torch.where(x.isposinf() | torch.isneginf(x), 1.0, x),
    "equal to inf": lambda x: torch.where(x.abs() == math.inf, 0, x),
    "below the end": lambda x: torch.where(x.abs() < END, x, 0),
    "differs from itself": lambda x: (lambda nan: torch.where(nan != nan, 0, x))(x - x),
    "minimum": lambda x: torch.minimum(x, torch.tensor(END).half()).clamp(min=-END),
    "min of two": lambda x: torch.min(x, torch.full_like(x, END)).clamp(min=-END),
    "bounds of many values": lambda x: x.clamp(torch.full_like(x, -END), torch.full_like(x, END)),
    "hardtanh": lambda x: nn.functional.hardtanh(x, -END, END),
    "fmax": lambda x: torch.fmin(torch.fmax(x, torch.tensor(-END).half()), torch.tensor(END).half()),
    "torch.nan_to_num": lambda x: torch.nan_to_num(x, nan=0.0, posinf=END, neginf=-END),
    "nan_to_num": lambda x: x.nan_to_num(),
    "nan_to_num_": lambda x: x.nan_to_num_(0.0),
    "torch.clamp": lambda x: torch.clamp(x, -END, END),
    "torch.clip by name": lambda x: torch.clip(input=x, min=-END, max=END),
    "clip": lambda x: x.clip(-END, END),
    "clamp_": lambda x: x.clamp_(min=-END, max=END),
    "clamp_max": lambda x: x.clamp_max(END).clamp_min(-END),
    "bounds in tensors": clip_as_t5,
    "only where something overflowed": clip_if_infinite,
}


class Clipping(nn.Module):
    """x [batch, 8] → same shape. Four layers; a helper clips each result in fp16."""

    def __init__(self, clip: Clip, hot: float = 1.0):
        super().__init__()
        self.clip = clip
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        generator = torch.Generator().manual_seed(0)
        for layer in self.layers:
            layer.weight.data = torch.randn((8, 8), generator=generator) * 8**-0.5
        self.layers[1].weight.data[:4] *= hot

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = self.clip(x) if x.dtype == torch.float16 else x
        return nn.functional.layer_norm(x, (8,))


def clip_input() -> torch.Tensor:
    return 4 * torch.randn((2, 8), generator=torch.Generator().manual_seed(1)).half()


def guarded(module: nn.Module, attempt: Callable[..., Any] | None = None) -> StageGuard:
    clips = ClipDetector("fp16")
    return guards.guarded(clips.wrap(attempt or module), rerun=module, peak_inside=clips.take)
