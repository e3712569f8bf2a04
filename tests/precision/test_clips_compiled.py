"""Clip detection in compiled code."""

from __future__ import annotations

import pytest
import torch
from clipping import CLIPS, Clipping, clip_input, guarded
from comfyui_onediff_guard.precision.guard import StageGuard
from torch import nn
from torch._dynamo.utils import counters


def clipping(name: str, backend: str) -> tuple[StageGuard, torch.Tensor]:
    """(guard, expected result) of a network whose blocks, a layer and its clip, are compiled like a denoiser's."""
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
    return guarded(module, compiled), Clipping(CLIPS[name], hot=4e4).half().float()(clip_input().float())


@pytest.mark.parametrize("name", ["torch.nan_to_num", "where isfinite", "masked_fill isnan and isinf", "equal to inf"])
@torch.no_grad()
def test_clips_in_compiled_blocks_are_detected_with_one_shared_graph(name: str) -> None:
    guard, right = clipping(name, "eager")
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert torch.equal(guard(clip_input()), right)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize("name", CLIPS)
@torch.no_grad()
def test_clips_compiled_by_inductor_are_detected_or_within_1_percent(name: str) -> None:
    """Inductor computes fused code in float32, where some of eager fp16's overflows do not occur."""
    guard, right = clipping(name, "inductor")
    for _ in range(2):
        assert (guard(clip_input()) - right).norm() <= 0.01 * right.norm()
