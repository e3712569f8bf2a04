"""A batch computed half by half, which takes half the memory: with guidance, one prompt after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def split_cfg_batch(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return both halves of a call's arguments; where the batch is odd, the whole.

    inputs: tensors of the batch's length have it first. The batch is that of the first tensor.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(dict(inputs)) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
    batch = len(leaves[0]) if leaves else 1
    if batch % 2:
        return [dict(inputs)]

    def half(number: int) -> dict[str, Any]:
        def part(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.chunk(2)[number] if leaf.ndim and len(leaf) == batch else leaf

        return pytree.tree_map_only(torch.Tensor, part, dict(inputs))

    return [half(0), half(1)]


def joined(made: Sequence[Any]) -> Any:
    """Return what a call gives for its whole batch, of what it gives for parts of it."""

    def cat(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]

    return pytree.tree_map(cat, *made)
