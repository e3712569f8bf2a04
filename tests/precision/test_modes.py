"""The pack's function modes with torch.compile: dynamo traces them and never compiles them separately."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.precision.overflow_detection import ClipDetector, propagate_nonfinite_attention
from comfyui_onediff_guard.precision.upcast import TraceableMode


class Bare(TraceableMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "bare": Bare,
    "clips": lambda: ClipDetector("fp16"),
    "attention": lambda: propagate_nonfinite_attention(torch.ones(1)),
}


def with_graph_breaks(x):
    """A graph break in a loop: dynamo cannot compile it as one, and each call becomes a frame of its own."""
    found = []
    for each in (x, x.float(), x):
        torch._dynamo.graph_break()
        found.append((each.dtype, each.to(each.dtype).dtype, torch.ones_like(each).to(x.dtype).dtype))
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_dtype_after_a_graph_break_is_the_tensors_own(mode, backend):
    torch._dynamo.reset()
    compiled = torch.compile(with_graph_breaks, backend=backend)
    half, single = torch.float16, torch.float32
    for _ in range(2):
        with mode(), torch.no_grad():
            found = compiled(torch.ones(2, dtype=half))
        assert found == [(half, half, half), (single, single, half), (half, half, half)]
