"""Which kernel computes attention: named, or measured on this device at the shapes of a run.

PyTorch chooses by a fixed order of what can take a call, not by speed. Which kernel is the fastest depends on the card,
its driver, the head size and the length.

SageAttention multiplies queries by keys in int8, and weights by values in fp16 or fp8. So it is inexact by more than
rounding, and turns what is not finite into numbers: what it is given is looked at, and NaN comes out where it was NaN.
It has not been run here, where there is no card: its call follows its documentation.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .dtypes import HALF_DTYPES
from .shared import NO_WARNINGS, PROCESS_GATE
from .upcast import TraceableMode

sdpa = torch.nn.functional.scaled_dot_product_attention
SAGE_CHANNELS = 128  # of a head, at most


TOLERANCE = 4.0  # times the least max |difference| to fp32 of any kernel, that one of PyTorch's may have
BUDGET = 0.05  # of the norm, that one that quantises may be off; int8 scores and fp8 values come to about 0.02 to 0.04


@dataclass(frozen=True)
class Error:
    """How far a kernel's results are from fp32's; infinite where one is NaN."""

    largest: float  # max |difference|
    share: float  # of the norm

    def over_budget(self, quantises: bool, least: float) -> str:
        """Say by how much it is more than it may be; "" where it is not.

        quantises: whether the kernel does. least: max |difference| to fp32 of the best kernel.
        """
        if quantises:
            return "" if self.share <= BUDGET else f"its error is {self.share:.0%} of the norm, beyond {BUDGET:.0%}"
        if self.largest <= TOLERANCE * least:
            return ""
        return f"its error is {self.largest / least if least else math.inf:.2g} times the least"


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention."""

    name: str
    preferring: Callable[[], AbstractContextManager[Any]]  # in it, attention is by the kernel wherever it takes a call
    run: Callable[[Mapping[str, Any]], torch.Tensor]  # by it alone; raises where it does not take the call
    quantises: bool = False  # it errs by more than rounding
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
    """Compute attention by SageAttention: NaN where a query, a key or a value is not finite. None where it does not
    take the call."""
    alike = query.ndim == 4 and query.dtype in HALF_DTYPES and query.dtype is key.dtype is value.dtype
    if not alike or attn_mask is not None or dropout_p or enable_gqa or query.shape[-1] > SAGE_CHANNELS:
        return None
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


class _BySage(TraceableMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo cannot follow from here
            return args[0].unflatten(*args[1:], **given)
        made = sage(*args, **given) if func is sdpa else None
        return func(*args, **given) if made is None else made


def _sage_alone(given: Mapping[str, Any]) -> torch.Tensor:
    if (made := sage(**given)) is None:
        raise RuntimeError("SageAttention does not take this call.")
    return made


# A new kernel is one row, at the end: their names stand in people's workflow files.
KERNELS: dict[str, Kernel] = {
    row.name: row
    for row in (
        _torchs("flash", _TORCHS["flash"], "cuda", "cpu"),
        _torchs("cudnn", _TORCHS["cudnn"], "cuda"),
        _torchs("efficient", _TORCHS["efficient"], "cuda"),
        _torchs("math", _TORCHS["math"], timed=False),  # it keeps all scores in memory, and is never the fastest
        Kernel("sage", _BySage, _sage_alone, quantises=True, lacking=_without_sage),
    )
}


def offered(device: torch.device) -> list[Kernel]:
    """Return the kernels that may be the fastest on a device, as far as that is known without a call. Where there are
    fewer than two, as on a CPU, there is nothing to choose from."""
    timed = [kernel for kernel in KERNELS.values() if kernel.timed and not kernel.lacking(device)]
    return [kernel for kernel in timed if not kernel.devices or device.type in kernel.devices]


logger = logging.getLogger(__name__)

_ROUNDS = 5
_CHECKED = 64  # queries whose result is compared with fp32's
MARGIN = 1.05  # by which another kernel must be faster than PyTorch's own choice: less is noise


@dataclass(frozen=True)
class AttentionCall:
    """One call of scaled dot-product attention."""

    query: tuple[int, ...]  # [batch, heads, tokens, channels]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[tuple[int, ...], torch.dtype] | None = None
    causal: bool = False
    scale: float | None = None

    def with_queries(self, number: int) -> AttentionCall:
        """Return the call with `number` of its queries alone. A mask with a row for each query is cut alike."""
        tokens = min(number, self.query[-2])
        mask = self.mask and ((*self.mask[0][:-2], min(tokens, self.mask[0][-2]), self.mask[0][-1]), self.mask[1])
        return replace(self, query=(*self.query[:-2], tokens, self.query[-1]), mask=mask)


@dataclass(frozen=True)
class Timing:
    """How fast and how exact one kernel is."""

    seconds: float  # for all attention of a step
    error: float  # max |difference| to fp32
    share: float = 0.0  # of the norm, that the difference is


@dataclass(frozen=True)
class KernelChoice:
    """The fastest kernel whose results are right."""

    kernel: str  # "" where that is PyTorch's own choice
    timings: Mapping[str, Timing]  # with "auto": PyTorch's own choice. Empty where there was nothing to choose from
    left_out: Mapping[str, str] = field(default_factory=dict)  # kernels beyond their error budget, and by how much

    def __str__(self) -> str:
        if not self.timings:
            return "attention: PyTorch's own choice, the only one here"
        if not self.kernel:
            said = "attention: PyTorch's own choice, measured the fastest here"
        else:
            ratio = self.timings["auto"].seconds / self.timings[self.kernel].seconds
            said = f"attention: {self.kernel}, measured {ratio:.2f} times as fast here as PyTorch's own choice"
            said += f", {share:.2g} of the norm from fp32" if (share := self.timings[self.kernel].share) else ""
        return "; ".join([said, *(f"not {name}: {why}" for name, why in self.left_out.items())])


def preferring(kernel: str) -> AbstractContextManager[Any]:
    """Return a context in which attention uses the kernel wherever it takes a call, else another one. Dynamo can trace
    it."""
    return KERNELS[kernel].preferring()


class Attended(torch.nn.Module):
    """A block whose attention is computed by one kernel, wherever it takes the call."""

    def __init__(self, block: Callable[..., Any], kernel: str):
        super().__init__()
        self.block = block
        self.kernel = kernel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # who compiles holds it exclusively already
            return self._preferring(*args, **kwargs)
        with PROCESS_GATE.exclusive():  # the choice of kernels is the process's
            return self._preferring(*args, **kwargs)

    def _preferring(self, *args: Any, **kwargs: Any) -> Any:
        with preferring(self.kernel):
            return self.block(*args, **kwargs)


def attention_calls(run: Callable[[], object]) -> Counter[AttentionCall]:
    """Count the calls of attention that are made while `run` runs, which may be on the meta device."""
    seen: Counter[AttentionCall] = Counter()

    class Recording(TraceableMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is sdpa:
                seen[_call(*args, **(kwargs or {}))] += 1
            return func(*args, **(kwargs or {}))

    with Recording():
        run()
    return seen


def measure(calls: Mapping[AttentionCall, int], device: torch.device) -> KernelChoice:
    """Time the kernels on random numbers, interleaved, check each against fp32, and return the fastest that is right.

    A kernel is left out where it does not take one of the calls, where it fails in one, or where its error is beyond
    its budget. Where there is none but PyTorch's own choice, nothing is timed. Raises RuntimeError where that one fails
    too, as where memory runs out.

    calls: how often each call comes in a step.
    """
    with torch.inference_mode(), PROCESS_GATE.exclusive():
        others = [kernel for kernel in offered(device) if all(_takes(kernel, call, device) for call in calls)]
        own = {_own(call, device) for call in calls} if others else set[SDPBackend]()
        if not calls or all({kernel.torch} == own for kernel in others):
            return KernelChoice("", {})
        errors, left_out = {"auto": _errors("auto", calls, device)}, dict[str, str]()
        for kernel in others:
            try:
                errors[kernel.name] = _errors(kernel.name, calls, device)
            except Exception as error:  # noqa: BLE001, PERF203 - another library's is its own
                left_out[kernel.name] = f"it failed ({type(error).__name__})"
        seconds = dict.fromkeys(errors, 0.0)
        for call, count in calls.items():
            for name, each in _seconds([*errors], call, device).items():
                seconds[name] += count * each
    least = min(error.largest for error in errors.values())
    quantise = {kernel.name for kernel in others if kernel.quantises}
    left_out |= {name: why for name in errors if (why := errors[name].over_budget(name in quantise, least))}
    handicapped = {name: seconds[name] * (1 if name == "auto" else MARGIN) for name in errors if name not in left_out}
    fastest = min(handicapped, key=handicapped.__getitem__, default="auto")
    timings = {name: Timing(seconds[name], error.largest, error.share) for name, error in errors.items()}
    chosen_anyway = fastest == "auto" or {KERNELS[fastest].torch} == own
    return KernelChoice("" if chosen_anyway else fastest, timings, left_out)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> AttentionCall:
    del dropout_p
    mask = None if attn_mask is None else (tuple(attn_mask.shape), attn_mask.dtype)
    return AttentionCall(tuple(query.shape), tuple(key.shape), tuple(value.shape), query.dtype, mask, is_causal, scale)


def _tensors(call: AttentionCall, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    made = {name: random(getattr(call, name), call.dtype) for name in ("query", "key", "value")}
    if call.mask:
        shape, dtype = call.mask
        mask = random(shape, torch.float32)
        made["attn_mask"] = mask > -1 if dtype is torch.bool else mask.to(dtype)
    return made | {"is_causal": call.causal, "scale": call.scale}


def _run(name: str, given: Mapping[str, Any]) -> torch.Tensor:
    return sdpa(**given) if name == "auto" else KERNELS[name].run(given)


def _takes(kernel: Kernel, call: AttentionCall, device: torch.device) -> bool:
    try:
        with NO_WARNINGS.held():  # of why it does not
            _run(kernel.name, _tensors(call.with_queries(_CHECKED), device))
    except Exception as error:  # noqa: BLE001 - PyTorch's is a RuntimeError; what another library raises is its own
        logger.debug("%s does not take %s: %s", kernel.name, call, error)
        return False
    return True


def _own(call: AttentionCall, device: torch.device) -> SDPBackend:
    """Return the kernel that PyTorch would choose."""
    return SDPBackend(torch._fused_sdp_choice(**_tensors(call.with_queries(_CHECKED), device)))


def _errors(name: str, calls: Iterable[AttentionCall], device: torch.device) -> Error:
    found = [_error(name, call, device) for call in calls]
    return Error(max(error.largest for error in found), max(error.share for error in found))


def _error(name: str, call: AttentionCall, device: torch.device) -> Error:
    """Make the whole call by a kernel, and compare some of its queries with fp32's result for these."""
    given = _tensors(call, device)
    rows = _rows(call)
    made = _run(name, given)[..., rows, :].float()
    some = given | {"query": given["query"][..., rows, :]}
    if call.mask and call.mask[0][-2] > 1:
        some["attn_mask"] = given["attn_mask"][..., rows, :]
    right = _run("math", {key: value.float() if _is_floating(value) else value for key, value in some.items()})
    difference = made - right
    largest, share = difference.abs().max().item(), (difference.norm() / right.norm()).item()
    return Error(*(math.inf if math.isnan(value) else value for value in (largest, share)))


def _rows(call: AttentionCall) -> list[int]:
    """Return the queries that are compared, from all over the call. A causal one's are the first: what they attend to
    does not hang on how many there are."""
    tokens = call.query[-2]
    number = min(_CHECKED, tokens)
    return [*range(number)] if call.causal else [tokens * row // number for row in range(number)]


def _seconds(names: Sequence[str], call: AttentionCall, device: torch.device) -> dict[str, float]:
    given = _tensors(call, device)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(1 + _ROUNDS):
        for name in names:
            _wait(device)
            started = time.perf_counter()
            _run(name, given)
            _wait(device)
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
