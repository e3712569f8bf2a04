"""Each function mode of the pack beside torch.compile: dynamo traces it, and never compiles it by itself."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.precision.overflow import ClipDetector, propagate_nonfinite_attention
from comfyui_onediff_guard.precision.upcast import TraceableMode


class Bare(TraceableMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "bare": Bare,
    "clips": lambda: ClipDetector("fp16"),
    "attention": lambda: propagate_nonfinite_attention(torch.ones(1)),
}


def given_up(x):
    """What dynamo cannot compile as one, since it stops in a loop; each call in it is a frame of its own then."""
    found = []
    for each in (x, x.float(), x):
        torch._dynamo.graph_break()
        found.append((each.dtype, each.to(each.dtype).dtype, torch.ones_like(each).to(x.dtype).dtype))
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_dtype_in_a_frame_that_is_given_up_is_the_tensors_own(mode, backend):
    torch._dynamo.reset()
    compiled = torch.compile(given_up, backend=backend)
    half, single = torch.float16, torch.float32
    for _ in range(2):
        with mode(), torch.no_grad():
            found = compiled(torch.ones(2, dtype=half))
        assert found == [(half, half, half), (single, single, half), (half, half, half)]
