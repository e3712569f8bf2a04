"""What a model clips in fp16 is seen in compiled code, too."""

from __future__ import annotations

import pytest
import torch
from clipping import CLIPS, Clipping, given, guarded
from torch import nn
from torch._dynamo.utils import counters


def compiled_like(module: Clipping, backend: str) -> Clipping:
    """A twin whose blocks, a layer and what clips its result, are compiled, as denoisers' blocks are."""
    torch.compiler.reset()
    clip, compiled = module.clip, Clipping(module.clip).half()
    compiled.load_state_dict(module.state_dict())

    class Block(nn.Module):
        def __init__(self, layer: nn.Module):
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return clip(self.layer(x))

    for index, layer in enumerate(compiled.layers):
        compiled.layers[index] = torch.compile(Block(layer), backend=backend)  # pyright: ignore[reportArgumentType]
    compiled.clip = lambda x: x
    return compiled


@pytest.mark.parametrize("name", ["torch.nan_to_num", "where isfinite", "masked_fill isnan and isinf", "equal to inf"])
@torch.no_grad()
def test_what_is_clipped_in_compiled_blocks_is_seen_and_they_share_their_code(name: str) -> None:
    module = Clipping(CLIPS[name], hot=4e4).half()
    guard, _ = guarded(module, compiled_like(module, "eager"))
    before = counters["stats"]["unique_graphs"]
    right = Clipping(CLIPS[name], hot=4e4).half().float()(given().float())
    for _ in range(2):
        assert torch.equal(guard(given()), right)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize("name", CLIPS)
@torch.no_grad()
def test_what_inductor_clips_is_seen_or_right(name: str) -> None:
    """It computes what it fuses in float32, where some of what eager fp16 clips does not overflow."""
    module = Clipping(CLIPS[name], hot=4e4).half()
    right = Clipping(CLIPS[name], hot=4e4).half().float()(given().float())
    guard, _ = guarded(module, compiled_like(module, "inductor"))
    for _ in range(2):
        assert (guard(given()) - right).norm() <= 0.01 * right.norm()
