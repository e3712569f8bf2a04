"""Attention kernels timed by a clock that they advance: whatever this machine is fast at, or busy with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import attention


def timed_as(patch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Each kernel takes its seconds, and one that is not named takes 2."""
    now, run = [0.0], attention._run

    def timed(name: str, given: Any) -> torch.Tensor:
        now[0] += seconds.get(name, 2.0)
        return run(name, given)

    patch.setattr(attention, "_run", timed)
    patch.setattr(attention, "time", SimpleNamespace(perf_counter=lambda: now[0]))
