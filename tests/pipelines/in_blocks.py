"""A network that calls its blocks one after another, for tests of compiling."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Denoiser(torch.nn.Module):
    def __init__(self, blocks: Iterable[torch.nn.Module]):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
