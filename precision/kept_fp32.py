"""A layer that computes in float32 inside a module that runs in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from .shells import both

_HALF = (torch.float16, torch.bfloat16)


class KeptInFp32:
    """A base before a layer's own class: half inputs become float32, and floating outputs have `outside`'s dtype.

    A float32 output would make the stream behind it float32, which the half-precision layers there refuse. A value that
    does not fit is infinite, for the guard to find.
    """

    outside: torch.nn.Parameter  # of no elements; its dtype is what the layer hands on

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        made = super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return pytree.tree_map_only(torch.Tensor, self._narrowed, made)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.outside.dtype) if tensor.is_floating_point() else tensor


def keep_in_fp32(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make a layer, and what is below it, compute in float32 and put out `dtype`.

    It keeps its place, its type and its weights' names, by which adapters, wide layers and islands know it.
    """
    if isinstance(layer, KeptInFp32):
        return
    outside = torch.nn.Parameter(torch.empty(0, dtype=dtype, device=next(layer.parameters()).device), False)
    layer.float()
    layer.__class__ = both(KeptInFp32, type(layer))
    # First: diffusers' VAEs take the dtype of the first weight below for that of the activations.
    layer._parameters = {"outside": outside, **layer._parameters}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
