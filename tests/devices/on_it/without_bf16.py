"""A card without bf16: `auto` uses fp16, and an overflowing residual stream gives the right result."""

from __future__ import annotations

import pytest
from comfyui_onediff_guard.precision.policy import Component
from small_runs import CPU, frames, opened


@pytest.mark.parametrize("model", ["2b", "cogview4"])
def test_overflowing_stream_is_near_fp32_in_fp16(model: str) -> None:
    handle = opened(model, "auto", "auto", "stream")
    made, exact = frames(handle), frames(opened(model, "none", "fp32", "stream", device=CPU))
    assert handle.architecture.name == "sm75" and handle.plan(Component.DENOISER).dtype == "fp16"
    assert (made - exact).norm() < 0.01 * exact.norm()
