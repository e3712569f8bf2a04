"""The kernels that compute attention: PyTorch's, and SageAttention's where somebody has installed it. One row each.

SageAttention multiplies queries by keys in int8, and weights by values in fp16 or fp8. So it is inexact by more than
rounding, and turns what is not finite into numbers: what it is given is looked at, and NaN comes out where it was NaN.
It has not been run here, where there is no card: its call follows its documentation.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .modes import Mode

sdpa = torch.nn.functional.scaled_dot_product_attention
_HALF = (torch.float16, torch.bfloat16)
SAGE_CHANNELS = 128  # of a head, at most


class Errors(Enum):
    """What a kernel's errors come of, and the most that they may be."""

    ROUNDING = "rounding"  # by as much as half precision does: 4 times the least error of any
    QUANTISING = "quantising"  # by more: 5 % of the norm


TOLERANCE = 4.0  # times the least max |difference| to fp32
BUDGET = 0.05  # of the norm; on normal numbers, int8 scores and fp8 values come to about 0.02 to 0.04


@dataclass(frozen=True)
class Measured:
    """How far a kernel's results are from fp32's."""

    largest: float  # max |difference|; infinite where one is NaN
    share: float  # of the norm


def over_budget(errors: Errors, found: Measured, least: float) -> str:
    """Say by how much a kernel's error is more than it may be; "" where it is not.

    least: max |difference| to fp32 of the best kernel.
    """
    if errors is Errors.QUANTISING:
        return "" if found.share <= BUDGET else f"its error is {found.share:.0%} of the norm, beyond {BUDGET:.0%}"
    if found.largest <= TOLERANCE * least:
        return ""
    return f"its error is {found.largest / least if least else math.inf:.2g} times the least"


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention."""

    name: str
    preferring: Callable[[], AbstractContextManager[Any]]  # in it, attention is by the kernel wherever it takes a call
    run: Callable[[Mapping[str, Any]], torch.Tensor]  # by it alone; raises where it does not take the call
    errors: Errors = Errors.ROUNDING
    timed: bool = True  # whether it may be the fastest
    lacking: Callable[[torch.device], str] = lambda _device: ""  # what it needs and is not here; "" where nothing is
    devices: tuple[str, ...] = ()  # kinds of devices that PyTorch has it for; (): wherever it lacks nothing
    torch: SDPBackend | None = None  # PyTorch's name for it


def _torchs(name: str, backend: SDPBackend, *devices: str, timed: bool = True) -> Kernel:
    def alone(given: Mapping[str, Any]) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(**given)

    def preferring() -> AbstractContextManager[Any]:
        """Dynamo can trace it."""
        if backend is SDPBackend.MATH:
            return sdpa_kernel([backend, SDPBackend.MATH])
        others = (other for other in _TORCHS.values() if other is not backend)
        return sdpa_kernel([backend, *others], set_priority=True)

    return Kernel(name, preferring, alone, timed=timed, devices=devices, torch=backend)


_TORCHS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def _without_sage(device: torch.device) -> str:
    if device.type != "cuda":
        return f"SageAttention runs on CUDA devices, not on {device.type}"
    if importlib.util.find_spec("sageattention") is None:
        return "sageattention is not installed"
    return ""


def sage_takes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Return whether SageAttention takes a call of PyTorch's attention."""
    del is_causal, scale
    alike = query.ndim == 4 and query.dtype in _HALF and query.dtype is key.dtype is value.dtype
    return alike and attn_mask is None and not dropout_p and not enable_gqa and query.shape[-1] <= SAGE_CHANNELS


def sage(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute attention by SageAttention. NaN where a query, a key or a value is not finite."""
    made = _sage_operator()(query, key, value, is_causal, scale)
    bounds = [bound for tensor in (query, key, value) for bound in torch.aminmax(tensor)]
    return made + sum(bound * 0 for bound in bounds)


@cache
def _sage_operator() -> Any:
    """SageAttention as an operator, which dynamo takes as it is. Looked up first: the pack can be imported twice."""
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


class _BySage(Mode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo cannot follow from here
            return args[0].unflatten(*args[1:], **given)
        if func is sdpa and sage_takes(*args, **given):
            return _given_to_sage(*args, **given)
        return func(*args, **given)


def _given_to_sage(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    del attn_mask, dropout_p, enable_gqa
    return sage(query, key, value, is_causal, scale)


def _sage_alone(given: Mapping[str, Any]) -> torch.Tensor:
    if not sage_takes(**given):
        raise RuntimeError("SageAttention does not take this call.")
    return _given_to_sage(**given)


# A new kernel is one row, at the end: their names stand in people's workflow files.
KERNELS: dict[str, Kernel] = {
    row.name: row
    for row in (
        _torchs("flash", _TORCHS["flash"], "cuda", "cpu"),
        _torchs("cudnn", _TORCHS["cudnn"], "cuda"),
        _torchs("efficient", _TORCHS["efficient"], "cuda"),
        _torchs("math", _TORCHS["math"], timed=False),  # it keeps all scores in memory, and is never the fastest
        Kernel("sage", _BySage, _sage_alone, Errors.QUANTISING, lacking=_without_sage),
    )
}


def offered(device: torch.device) -> list[Kernel]:
    """Return the kernels that may be the fastest on a device, as far as that is known without a call. Where there are
    fewer than two, as on a CPU, there is nothing to choose from."""
    timed = [kernel for kernel in KERNELS.values() if kernel.timed and not kernel.lacking(device)]
    return [kernel for kernel in timed if not kernel.devices or device.type in kernel.devices]
