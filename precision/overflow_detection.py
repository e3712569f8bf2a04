"""Overflow detection: by a call's output, by the values that it clips, and by NaN in attention.

A clipped value is finite and wrong, so the output does not show it. Flux, Lumina2 and Z-Image hide overflow by
`nan_to_num`, ACE-Step by `clip`, transformers' T5 by `clamp`, some of them in helper functions. Others replace values
after `isfinite` or a comparison; quantised layers round their input; video VAEs divide by a norm that overflows first.
A function mode sees each such call wherever it is made, and PyTorch traces it into compiled code too.

Masks are the opposite case: -inf and the largest value of a dtype belong there, and fp32 has them at the same places.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from .dtypes import DTYPES, FP16_MAX
from .layer_peaks import Agree, alone, floating, largest
from .upcast import TraceableMode, is_quantised


@dataclass(frozen=True)
class Range:
    """The range of some tensors' values."""

    finite: bool
    largest: float | None  # max |x|; None without values, or where one is not finite

    def outcome(self, dtype: str, inside: Range) -> str:
        """Return the outcome of a call whose output has this range, as the report names it.

        dtype: the dtype that the call computed in.
        inside: the range of the values that the stage clipped, if it is watched for that.
        """
        if not self.finite or not inside.finite:
            return "non-finite"
        if dtype == "fp16" and max(self.largest or 0, inside.largest or 0) >= FP16_MAX:
            return "saturated"
        return "finite"


class PendingReads:
    """Numbers of a run that are read together with the next measured ranges, so that they cost no transfer of their
    own."""

    def __init__(self) -> None:
        self._requested: dict[str, torch.Tensor] = {}
        self._received: dict[str, float] = {}

    def request(self, name: str, value: torch.Tensor) -> None:
        """Request a number, in place of an earlier one of that name. value: [], not negative."""
        self._requested[name] = value.detach().float()

    def take(self, name: str) -> float | None:
        """Return a number that was read, and drop it; None if it was not read yet."""
        return self._received.pop(name, None)

    def drop(self, name: str) -> None:
        """Drop a number, read or not."""
        self._requested.pop(name, None)
        self._received.pop(name, None)

    def requested(self) -> list[torch.Tensor]:
        return [*self._requested.values()]

    def receive(self, numbers: list[float]) -> None:
        """Take the numbers that were requested, in the order of `requested`."""
        self._received.update(zip(self._requested, numbers, strict=True))
        self._requested.clear()


def measure_ranges(
    given: Any,
    made: Any,
    inside: torch.Tensor | None = None,
    timestep: Any = None,
    agree: Agree = alone,
    pending: PendingReads | None = None,
) -> tuple[Range, Range, Range, float | None]:
    """Return the ranges of some inputs, of the output and of `inside`, and the timestep, by one transfer to the host.

    pending: further numbers that are read by the same transfer.
    """
    given, made, pending = floating(given), floating(made), pending or PendingReads()
    values = [bound.float() for tensor in (*given, *made) for bound in torch.aminmax(tensor.detach())]
    inside_at = len(values)
    if inside is not None:
        values.append(inside)
    if isinstance(timestep, torch.Tensor) and timestep.numel():
        values.append(timestep.detach().reshape(-1)[0].float())
    else:
        timestep = None
    own = len(values)
    values += pending.requested()
    numbers: list[float] = []
    if values:
        numbers = agree(torch.stack([value.to(values[0].device) for value in values])).tolist()
    pending.receive(numbers[own:])
    numbers = numbers[:own]
    bounds, rest = numbers[:inside_at], numbers[inside_at:]
    return (
        _range_of(bounds[: 2 * len(given)]),
        _range_of(bounds[2 * len(given) :]),
        _range_of(rest[:1] if inside is not None else []),
        rest[-1] if timestep is not None else None,
    )


def _range_of(bounds: list[float]) -> Range:
    if not bounds:
        return Range(True, None)
    if all(abs(bound) < float("inf") for bound in bounds):  # false for NaN too
        return Range(True, max(map(abs, bounds)))
    return Range(False, None)


_ENDS = tuple(torch.finfo(dtype).max for dtype in DTYPES.values())
_KEPT = 8  # outputs whose places are kept: a stage may be called with several shapes in turn
RangeEnds = tuple[torch.Tensor, ...]  # int8: -1 and 1 where a value is at the lower and the upper end, else 0


def only_minus_inf(output: Any) -> bool:
    """Return whether all values of an output are finite or -inf."""
    return not any(bool(((tensor != tensor) | (tensor == torch.inf)).any()) for tensor in floating(output))


def range_ends(output: Any, dtype: str) -> RangeEnds | None:
    """Return where an output in `dtype` is at the end of its range; None if it has NaN or +inf, which no mask has.

    For "fp32", these are -inf and the exact largest values of other dtypes.
    """
    if not only_minus_inf(output):
        return None
    found: list[torch.Tensor] = []
    for tensor in floating(output):
        at_end = tensor.isneginf()
        if dtype == "fp32":
            for end in _ENDS:
                at_end = at_end | (tensor.abs() == end)
        else:
            at_end = at_end | (tensor.abs() >= torch.finfo(DTYPES[dtype]).max)
        found.append(torch.where(at_end, tensor.sign(), 0).to(torch.int8))
    return tuple(found)


class KnownRangeEnds:
    """Places at which a stage's output is rightly at the end of its range, as in a mask."""

    def __init__(self) -> None:
        self._known: list[RangeEnds] = []

    def known(self, now: RangeEnds | None) -> bool:
        return now is not None and any(_same_ends(now, known) for known in self._known)

    def learn(self, in_half: RangeEnds | None, in_fp32: Any) -> bool:
        """Return whether the output in fp32 has the same values at the same places, and keep them if so."""
        right = range_ends(in_fp32, "fp32") if in_half is not None else None
        if in_half is None or right is None or not _same_ends(in_half, right):
            return False
        self._known = [*self._known, in_half][-_KEPT:]
        return True


def _same_ends(one: RangeEnds, other: RangeEnds) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


CLAMP_MIN = 6e4  # a larger upper bound is meant for fp16: T5's is 64504, others are 65504
FP16_INF = 65520.0  # rounds to infinity in fp16: a bound from here on clips nothing
FP8_MAX = 448.0  # the largest float8_e4m3fn. ComfyUI clamps inputs of fp8 products to it, infinities included

_T = torch.Tensor
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # of a library: comfy_kitchen's quantize_fp8


def _named(*names: str) -> frozenset[str]:
    """Return the names of functions, and of what does the same in place or by an operator. In sets of functions dynamo
    takes Tensor.__pow__ for another one."""
    return frozenset(form.format(name) for name in names for form in ("{}", "{}_", "__{}__"))


_NAN_TO_NUM, _CLAMP, _CLAMP_MAX = _named("nan_to_num"), _named("clamp", "clip"), _named("clamp_max")
_MINIMUM = _named("minimum", "min")  # of two tensors; also of one, along a dimension
# Tensor.__itruediv__ is called "__idiv__"
_DIVIDE = _named("div", "divide", "true_divide", "truediv", "itruediv", "idiv", "addcdiv")
_NORMS = _named("norm", "linalg_norm", "linalg_vector_norm")
_RSQRT, _POWERS, _INVERSES = _named("rsqrt"), _named("pow", "float_power"), _named("reciprocal", "rdiv", "rtruediv")
# functions that test for non-finite values, which a model then replaces, or that leave out NaN
_FINITENESS_TESTS = _named("isfinite", "isinf", "isnan", "isposinf", "isneginf", "nansum", "nanmean", "fmin", "fmax")
_COMPARES = _named("eq", "ne", "lt", "le", "gt", "ge")
_PARSE_TO = getattr(torch._C, "_nn")._parse_to  # noqa: B009 - it has no stubs


class ClipDetector(TraceableMode):
    """A function mode that records the largest |x| that a call of a stage clips, without waiting for the device.

    A mode costs about 3 µs of Python for each function that the stage calls. So if the first call neither clips nor
    tests for infinity, later calls run without it. Compiled code keeps it: it has no such cost, and would recompile.

    dtype: the dtype of the stage's plan. Only "fp16" is watched.
    may_clip: returns whether a call may clip although earlier calls did not. Called with whether to look closely (once,
        for the first call), and with the call's arguments.
    """

    def __init__(self, dtype: str, may_clip: Callable[..., bool] = lambda _closely, *_, **__: False) -> None:
        super().__init__()
        self._may_clip = may_clip
        # the largest |x| that was clipped: one tensor, since a list would recompile for each of its lengths
        self.peak = torch.zeros(())
        self._needed = False
        self._off, self._idle = dtype != "fp16", False

    def wrap(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a stage, so that each call of it is watched."""
        return partial(self._attempt, stage)

    def _attempt(self, stage: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._off or (self._idle and not self._may_clip(False, *args, **kwargs)):
            return stage(*args, **kwargs)
        self.peak = torch.zeros((), device=_device_of((args, kwargs)))
        with self:
            made = stage(*args, **kwargs)
        self._needed = self._needed or self._may_clip(not self._idle, *args, **kwargs)
        self._idle = not self._needed and not _compiled_something()
        return made

    def take(self) -> torch.Tensor | None:
        """Return the largest clipped |x| of the latest call, float32 []: a value was clipped if it is 65504 or more, or
        not finite. None if the stage has no function that clips."""
        return self.peak if self._needed else None

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _PARSE_TO:  # by `Module.to`: dynamo has a stand-in for it, which 2.11 cannot look up in a set
            return func(*args, **kwargs)
        name, given = getattr(func, "__name__", ""), args[0] if args else kwargs.get("input")
        if name in _FINITENESS_TESTS or (name in _COMPARES and _tests_for_range_end(*args[:2])):
            self._record_test(given)
        if name in _NAN_TO_NUM:
            self._record_clip(given, FP16_MAX)
        elif name in _CLAMP:
            low = args[1] if len(args) > 1 else kwargs.get("min")
            self._record_clip(given, args[2] if len(args) > 2 else kwargs.get("max"), low)
        elif name in _CLAMP_MAX:
            self._record_clip(given, args[1] if len(args) > 1 else kwargs.get("max"))
        elif func is torch.nn.functional.hardtanh:
            self._record_clip(given, args[2] if len(args) > 2 else kwargs.get("max_val", 1.0))
        elif name in _MINIMUM:
            other = args[1] if len(args) > 1 else kwargs.get("other")
            self._record_clip(given, other)
            if isinstance(other, torch.Tensor) and other.numel() > 1:
                self._record_clip(other, given)
        elif func is torch.nn.functional.normalize:
            self._record_norm(*args, **kwargs)
        elif name in _RSQRT or _is_one_over(name, args, kwargs):
            self._record_divisor(given)
        elif name in _DIVIDE and (divisor := _norm_in(args, kwargs)) is not None:
            self._record_divisor(divisor)
        elif name in _NORMS:
            made = func(*args, **kwargs)
            self._record_divisor(made)
            return made
        elif _rounds_its_input(func, args):
            self._record_quantised(given)
        return func(*args, **kwargs)

    def _record_clip(self, given: Any, bound: Any, low: Any = None) -> None:
        """Record what is clipped to an upper bound. A bound far below fp16's largest value is the model's own, and acts
        in fp32 too. For a bound of many values, only infinities count. low: a lower bound; without one -inf stays."""
        if not _is_fp16(given):
            return
        if isinstance(bound, torch.Tensor) and bound.numel() > 1:
            beyond = given.detach() if low is None else given.detach().abs()
            self._record_peak(torch.where(((beyond == torch.inf) & (bound.detach() < FP16_INF)).any(), torch.inf, 0.0))
            return
        counts: bool | torch.Tensor = False
        to_fp8 = False
        if isinstance(bound, torch.Tensor) and bound.numel() == 1:
            bound = bound.detach().reshape(()).float()
            counts = (bound >= CLAMP_MIN) & (bound < FP16_INF)
        elif isinstance(bound, (int, float)):
            to_fp8 = bound == FP8_MAX
            counts = to_fp8 or CLAMP_MIN <= bound < FP16_INF
        if counts is False:
            return
        peak = largest(given)
        if to_fp8:
            peak = torch.where(peak.isinf(), peak, 0.0)
        else:
            peak = torch.where(peak >= bound, peak.clamp(min=FP16_MAX), peak)
        if isinstance(counts, torch.Tensor):
            peak = torch.where(counts, peak, 0.0)
        self._record_peak(peak)

    def _record_test(self, given: Any) -> None:
        """Record non-finite values that the model tests for: it replaces them by finite, wrong ones. If only -inf
        occurs and no value is above 0, it is a mask, which is -inf in fp32 too."""
        self._needed = True
        if _is_fp16(given):
            least, most = torch.aminmax(given.detach())
            masks = (least == -math.inf) & (most <= 0)
            peak = torch.maximum(least.abs(), most.abs()).float()
            self._record_peak(torch.where(peak.isfinite() | masks, 0.0, peak))

    def _record_norm(self, input: Any, p: float = 2.0, dim: Any = 1, *_: Any, **__: Any) -> None:  # noqa: A002
        """Record a norm that overflows fp16: a division by it gives zeros, as in the VAEs of Wan and HunyuanVideo
        1.5."""
        if _is_fp16(input):
            peak = torch.linalg.vector_norm(input.detach(), p, dim, dtype=torch.float32).amax()
            self._record_peak(torch.where(peak >= FP16_INF, peak, 0.0))

    def _record_divisor(self, given: Any) -> None:
        """Record an infinite divisor, of a norm that is written out, as in LTXV's VAE: squares overflow fp16 from 256
        on."""
        if _is_fp16(given):
            peak = largest(given)
            self._record_peak(torch.where(peak.isinf(), peak, 0.0))

    def _record_quantised(self, given: Any) -> None:
        """Record non-finite values that are quantised: a CPU keeps NaN, a GPU's kernel turns it into a number."""
        if _is_fp16(given):
            peak = largest(given)
            self._record_peak(torch.where(peak.isfinite(), 0.0, peak))

    def _record_peak(self, peak: torch.Tensor) -> None:
        self._needed = True
        self.peak.copy_(torch.maximum(self.peak, peak.to(self.peak.device)))  # nothing new may outlive the call


def _is_fp16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16 and value.numel() > 0


def _tests_for_range_end(values: Any = None, bound: Any = None) -> bool:
    """Return whether a comparison tests for infinity, for fp16's largest value, or for NaN, which differs from
    itself."""
    if isinstance(bound, (int, float)):
        return not abs(bound) < CLAMP_MIN and isinstance(values, torch.Tensor)
    return values is bound


def _norm_in(args: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor | None:
    """Return a division's divisor if it is shared by many values, or reduced to one channel, as a norm is."""
    values, divisor = args[0] if args else None, args[-1] if len(args) > 1 else named.get("other")
    if not (isinstance(values, torch.Tensor) and isinstance(divisor, torch.Tensor)):
        return None
    return divisor if divisor.numel() < values.numel() or divisor.shape[-1:].numel() == 1 else None


def _is_one_over(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a function inverts a tensor, as code does that multiplies by 1 / norm."""
    if name in _POWERS:
        exponent = args[1] if len(args) > 1 else named.get("exponent", 0)
        return isinstance(exponent, torch.Tensor) or (isinstance(exponent, (int, float)) and exponent < 0)
    return name in _INVERSES


def _rounds_its_input(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call may quantise its input: a library's operator, or a product with quantised weights."""
    if func is torch.nn.functional.linear:
        return len(args) > 1 and is_quantised(args[1])
    return isinstance(func, OPERATORS) and func.__name__[:9] == "quantize_"  # dynamo traces no method of such a name


def _device_of(inputs: Any) -> torch.device | None:
    """Return the device that a stage computes on: that of the first floating tensor, since a denoiser may also get host
    tensors; without one that of any tensor, since a text encoder gets only token ids."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return next((tensor.device for tensor in (*floating(tensors), *tensors)), None)


def _compiled_something() -> bool:
    """Return whether this process has compiled anything so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


sdpa = torch.nn.functional.scaled_dot_product_attention


def all_fit(*tensors: torch.Tensor) -> torch.Tensor:
    """Return whether all values are finite in their tensors' dtypes. bool []. Compares magnitudes: inside a kernel, a
    compiler may leave out roundings, and simplifies x · 0 to 0."""
    return torch.stack([(each.abs() <= torch.finfo(each.dtype).max).all() for each in tensors]).all()


def propagate_nonfinite_attention(inputs: Any) -> AbstractContextManager[Any]:
    """Return a context in which attention on the CPU returns NaN if a query or a key is not finite.

    With fewer keys than a vector register holds (16 or 8), PyTorch's CPU kernel returns 0 for a row whose scores are
    all NaN: finite and wrong. Other results stay bit-equal. On other devices the context does nothing.

    inputs: a nest of the arguments of the calls inside; its tensors give the device.
    """
    on_cpu = {leaf.device.type for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)} == {"cpu"}
    return _NonfiniteAttentionMode() if on_cpu else nullcontext()


class BlockWithNanAttention(torch.nn.Module):
    """A block to compile for the CPU, with `propagate_nonfinite_attention` inside if the caller has it on.

    The caller's context is a mode, which would also see each function that compiled code calls. So `run` calls the
    compiled block without it.
    """

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, shown: bool, *args: Any, **kwargs: Any) -> Any:
        with _NonfiniteAttentionMode() if shown else nullcontext():
            return self.block(*args, **kwargs)

    @staticmethod
    def run(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled BlockWithNanAttention."""
        modes = _get_current_function_mode_stack()
        at = next((at for at, mode in enumerate(modes) if isinstance(mode, _NonfiniteAttentionMode)), None)
        if at is None:
            return compiled(False, *args, **kwargs)
        with ExitStack() as put_back:
            for _ in modes[at:]:
                put_back.enter_context(_pop_mode_temporarily())
            for mode in modes[at + 1 :]:
                put_back.enter_context(mode)
            return compiled(True, *args, **kwargs)


class _NonfiniteAttentionMode(TraceableMode):
    """It is around all that is computed in half precision, and adds one frame to that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo cannot follow from here
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        return _nan_if_not_finite(made, *args, **(kwargs or {})) if func is sdpa else made


def _nan_if_not_finite(made: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return attention's output, all NaN if a query or a key is not finite.

    A finite sum shows that all values are finite. A sum that is not may have overflowed itself, so values are checked.
    """
    if not torch.compiler.is_compiling() and math.isfinite((query.detach().sum() + key.detach().sum()).item()):
        return made
    return torch.where(all_fit(query, key), made, torch.nan)
