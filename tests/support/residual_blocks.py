"""A small transformer block, from which tests build networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    """Reads the residual stream through a norm and adds to it."""

    def __init__(self, width: int, squash: Callable[[torch.Tensor], torch.Tensor] = nn.functional.gelu):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.write = nn.Linear(2 * width, width)
        self.squash = squash

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.write(self.squash(self.inner(self.norm(x))))
