"""A device like an Apple GPU: no stage or preview uses float64, streams or page-locked memory. float64 tensors of a
model become float32."""

from __future__ import annotations

import pytest
from comfyui_onediff_guard.pipelines.insight.probe import usual_size
from comfyui_onediff_guard.pipelines.run.previews import Previews
from small_runs import CPU, frames, opened


@pytest.mark.parametrize("model", ["2b", "cogview4"])
def test_run_without_float64_and_streams_is_near_fp32(model: str) -> None:
    on_cpu = opened(model, "none", "fp32", "stream", device=CPU)
    size = usual_size(on_cpu, 0, 0, 0)  # for other sizes diffusers computes a table that depends on the device
    exact = frames(on_cpu, size)
    for offload in ("none", "model"):
        handle, pictures = opened(model, offload, "fp16", "stream"), []
        made = frames(handle, size, previews=Previews(pictures.append))
        assert (made - exact).norm() < 0.01 * exact.norm(), offload
        assert len(pictures) == (2 if model == "2b" else 0), offload
        handle.store.empty()
