"""A step cache adds no host wait: the values that it needs come with the guard's own transfer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.guard import StageGuard
from host_reads import HostReads
from small_runs import opened
from test_step_cache_runs import MODELS, WIDE, run

SCHEDULERS = [("2b", "DDIM"), ("2b", "DPM")]
CASES = [
    *((model, {}, False) for model in MODELS),
    *((model, {"scheduler": each}, False) for model, each in SCHEDULERS),
]


@pytest.mark.parametrize(("model", "more", "inference"), [*CASES, ("2b", {}, True), ("wan", {}, True)])
def test_step_cache_adds_no_host_reads(
    monkeypatch: pytest.MonkeyPatch, model: str, more: dict[str, Any], inference: bool
) -> None:
    """Reads of tensors that derive from the denoiser's inputs, and of timesteps. inference: as ComfyUI runs nodes."""
    handle, reads = opened(model), HostReads()
    run(handle, model, steps=1)  # its prompts are encoded once
    call = StageGuard.__call__

    def marking(guard: StageGuard, *args: Any, **kwargs: Any) -> Any:
        reads.mark((args, kwargs))
        return call(guard, *args, **kwargs)

    monkeypatch.setattr(StageGuard, "__call__", marking)

    def counted(policy: CachePolicy | None) -> tuple[Counter[str], Any]:
        reads.reads.clear()
        with torch.inference_mode(inference), reads.leaving(), reads:
            _, report = run(handle, model, policy, **more)
        return +reads.reads, report

    without, before = counted(None)
    found, report = counted(WIDE)
    assert report.cache.compared and (report.cache.cached or more)
    assert len(report.steps) == len(before.steps) and without["tolist"] >= len(report.steps), "guard's reads count"
    assert found == without
