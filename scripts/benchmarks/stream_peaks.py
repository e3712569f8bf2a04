"""The largest value of a denoiser's residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from comfyui_onediff_guard.precision.layer_peaks import block_names, hooked, largest


def stream_peak(module: torch.nn.Module, blocks: Iterable[str], call: Callable[[], Any]) -> float:
    """Return max |x| of the residual stream after the blocks while `call` runs `module`; inf, NaN if it overflowed.

    blocks: names of blocks, or of lists of blocks.
    """
    peaks: list[torch.Tensor] = []
    parts = {name: module.get_submodule(name) for name in block_names(module, blocks)}
    with hooked(parts, lambda _name, _block, _given, made: peaks.append(largest(made))):
        call()
    return torch.stack(peaks).amax().item()
