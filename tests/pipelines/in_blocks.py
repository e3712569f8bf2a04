"""A network of blocks that are called one after another, for tests of what is compiled of it."""

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
