"""What a model clips in fp16 is seen in compiled code, too."""

from __future__ import annotations

import pytest
import torch
from clipping import CLIPS, Clipping, given, guarded
from comfyui_onediff_guard.precision.guard import StageGuard
from torch import nn
from torch._dynamo.utils import counters


def clipping(name: str, backend: str) -> tuple[StageGuard, torch.Tensor]:
    """(guard, what is right) of a network whose blocks, a layer and what clips its result, are compiled, as denoisers'
    blocks are."""
    torch.compiler.reset()
    module, compiled = (Clipping(CLIPS[name], hot=4e4).half() for _ in range(2))

    class Block(nn.Module):
        def __init__(self, layer: nn.Module):
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return module.clip(self.layer(x))

    for index, layer in enumerate(compiled.layers):
        compiled.layers[index] = torch.compile(Block(layer), backend=backend)  # pyright: ignore[reportArgumentType]
    compiled.clip = lambda x: x
    return guarded(module, compiled), Clipping(CLIPS[name], hot=4e4).half().float()(given().float())


@pytest.mark.parametrize("name", ["torch.nan_to_num", "where isfinite", "masked_fill isnan and isinf", "equal to inf"])
@torch.no_grad()
def test_what_is_clipped_in_compiled_blocks_is_seen_and_they_share_their_code(name: str) -> None:
    guard, right = clipping(name, "eager")
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert torch.equal(guard(given()), right)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize("name", CLIPS)
@torch.no_grad()
def test_what_inductor_clips_is_seen_or_right(name: str) -> None:
    """It computes what it fuses in float32, where some of what eager fp16 clips does not overflow."""
    guard, right = clipping(name, "inductor")
    for _ in range(2):
        assert (guard(given()) - right).norm() <= 0.01 * right.norm()
