"""Which kernel computes attention: PyTorch's own choice, or the one that is named.

SageAttention multiplies queries by keys in int8, and weights by values in fp16 or fp8. So its error is more than
rounding, and it turns non-finite values into numbers: its inputs are checked, and the result is NaN if they are not
finite. Nobody has run it here for want of a card; the call follows its documentation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .dtypes import HALF_DTYPES
from .overflow_detection import all_fit, sdpa
from .process_state import PROCESS_GATE
from .upcast import TraceableMode

SAGE = "sage"
SAGE_CHANNELS = 128  # of a head, at most
# PyTorch's name of each kernel. Add new ones at the end: the names are saved in users' workflow files.
KERNELS: dict[str, SDPBackend | None] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    SAGE: None,
}


def missing(kernel: str, device: torch.device) -> str:
    """Say what a kernel needs and does not find; "" if nothing is missing. PyTorch's own kernels fall back by
    themselves."""
    if kernel != SAGE:
        return ""
    if device.type != "cuda":
        return f"SageAttention runs on CUDA devices, not on {device.type}"
    if importlib.util.find_spec("sageattention") is None:
        return "sageattention is not installed"
    return ""


def sage(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Compute attention by SageAttention: NaN if a query, a key or a value is not finite. None if it does not support
    the call."""
    alike = query.ndim == 4 and query.dtype in HALF_DTYPES and query.dtype is key.dtype is value.dtype
    if not alike or attn_mask is not None or dropout_p or enable_gqa or query.shape[-1] > SAGE_CHANNELS:
        return None
    made = _sage_operator()(query, key, value, is_causal, scale)
    return torch.where(all_fit(query, key, value), made, torch.nan)


@cache
def _sage_operator() -> Any:
    """Return SageAttention as a custom operator, which dynamo does not trace into. It may exist already: the pack can
    be imported twice."""
    if hasattr(torch.ops.onediff_guard, "sage_attention"):
        return torch.ops.onediff_guard.sage_attention

    def by_sage(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
    ) -> torch.Tensor:
        from sageattention import sageattn  # pyright: ignore[reportMissingImports]

        return sageattn(query, key, value, tensor_layout="HND", is_causal=causal, sm_scale=scale).contiguous()

    schema = "(Tensor query, Tensor key, Tensor value, bool causal, float? scale) -> Tensor"
    made = torch.library.custom_op("onediff_guard::sage_attention", by_sage, mutates_args=(), schema=schema)
    made.register_fake(lambda query, *_: query.new_empty(query.shape))
    return torch.ops.onediff_guard.sage_attention


class _BySage(TraceableMode):
    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = sage(*args, **kwargs) if func is sdpa else None
        return func(*args, **kwargs) if made is None else made


def preferring(kernel: str) -> AbstractContextManager[Any]:
    """Return a context in which attention uses the kernel if it supports the call, else another one. Dynamo can trace
    it."""
    backend = KERNELS[kernel]
    if backend is None:
        return _BySage()
    if backend is SDPBackend.MATH:
        return sdpa_kernel([backend, SDPBackend.MATH])
    others = (other for other in KERNELS.values() if other is not None and other is not backend)
    return sdpa_kernel([backend, *others], set_priority=True)


class Attended(torch.nn.Module):
    """A block whose attention uses one kernel wherever it supports the call."""

    def __init__(self, block: Callable[..., Any], kernel: str):
        super().__init__()
        self.block = block
        self.kernel = kernel
        if kernel == SAGE:
            _sage_operator()  # which dynamo cannot make

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # who compiles holds it exclusively already
            return self._preferring(*args, **kwargs)
        with PROCESS_GATE.exclusive():  # the choice of kernels is the process's
            return self._preferring(*args, **kwargs)

    def _preferring(self, *args: Any, **kwargs: Any) -> Any:
        with preferring(self.kernel):
            return self.block(*args, **kwargs)
