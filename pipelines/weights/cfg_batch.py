"""A batch computed half by half, which takes half the memory: with guidance, one prompt after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.shallow_copy import with_forward


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


def with_split_cfg_batch(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same call, made half by half. Of a module, a shell."""

    def apart(**inputs: Any) -> Any:
        return joined([call(**part) for part in split_cfg_batch(inputs)])

    return with_forward(call, apart) if isinstance(call, torch.nn.Module) else apart


def joined(made: Sequence[Any]) -> Any:
    """Return what a call gives for its whole batch, of what it gives for parts of it."""
    flat = [pytree.tree_flatten(each) for each in made]
    leaves = [_cat(parts) for parts in zip(*(each for each, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _cat(parts: Sequence[Any]) -> Any:
    return torch.cat([*parts]) if isinstance(parts[0], torch.Tensor) else parts[0]
