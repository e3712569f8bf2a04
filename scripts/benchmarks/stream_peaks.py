"""What a denoiser's residual stream reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfyui_onediff_guard.precision.observe import hooked, largest
from comfyui_onediff_guard.precision.overrides import Stream


def stream_peak(module: torch.nn.Module, stream: Stream, call: Callable[[], Any]) -> float:
    """max |x| of the residual stream while `call` runs `module`, read at its norms' inputs. inf or NaN: it
    overflowed."""
    peaks: list[torch.Tensor] = []
    norms = {name: module.get_submodule(name) for name in stream.norm_names(module)}
    with hooked(norms, lambda _name, _norm, given, _made: peaks.append(largest(given[0]))):
        call()
    return torch.stack(peaks).amax().item()
