"""Planned products: a network in fp16 by what one step of it has shown, each layer as its plan says.

Where a layer's input and output have room, it is plain fp16, and hands on fp16. Elsewhere its input is divided by a
constant power of two, and its product is float32: no output can overflow, so no weight has to be read and nothing is
scaled back by rows. Sums of two tensors are float32, norms compute in it, and so does what is not known to be safe.

What leaves a plan's range is infinite, and stays so or becomes NaN on its way to the output, where the guard sees it.
What makes something finite of it is looked at before, and so is what a constant scale may have flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from .fp32_settings import autocast_off_where_on
from .overflow import made_finite
from .scaled_products import ScaledHalfMatmulMode, lost_digits
from .upcast import ALIASING, METADATA, Fp32Mode, OneOperation

FP16 = torch.float16
ROOM = 10  # log2 of what a peak may be in fp16: six bits below the end, for later steps that are louder
Key = tuple[int, int]  # the id of a weight, or of the layer that has it; how many calls there were since, of others


class Scale(NamedTuple):
    """How a layer, or another function, is computed from the second step on."""

    exponent: int = 0  # its input is divided by 2 to the power of it
    half: bool = False  # it hands on fp16
    loudness: float = 1.0  # its weight is divided by that, a power of two, before it is cast to fp16
    least: float = 0.0  # a row whose product reaches less, before it is scaled back, has lost digits


class LocatedMode(ScaledHalfMatmulMode):
    """Knows which layer a call is of: by its weight, or by the layer that the weight was last cast for."""

    def __init__(self) -> None:
        super().__init__(FP16)
        self._layer_at_hand: Any = None
        self._at, self._since = 0, 0

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, OneOperation) and func.for_products:
            self._layer_at_hand = args[0] if args else next(iter(kwargs.values()), None)
        return super().computed(func, args, kwargs)

    def begin(self) -> None:
        self._layer_at_hand, self._at, self._since = None, 0, 0

    def at_layer(self, weight: torch.Tensor) -> Any:
        """Return what stands for the layer that is computed now."""
        anchor = weight if isinstance(weight, torch.nn.Parameter) else self._layer_at_hand
        self._layer_at_hand = None
        self._at, self._since = id(anchor), 0
        return anchor

    def next_key(self) -> Key:
        self._since += 1
        self._layer_at_hand = None
        return self._at, self._since


class PlannedMode(LocatedMode):
    """Each layer computed as its plan says."""

    is_first = False

    def __init__(
        self,
        plan: dict[Key, Scale],
        anchors: dict[int, Callable[[], Any]],
        summed: Set[Key] = frozenset(),
        *,
        copies: bool,
    ):
        super().__init__()
        self._plan, self._anchors = plan, anchors
        self._summed = summed  # what the network adds to in place: it is float32
        self._copies = copies  # what casts to half precision copies: the network changes tensors in place
        self._lost: list[torch.Tensor] = []  # bool []: whether a constant scale flushed digits
        self._asked: list[tuple[torch.Tensor, torch.Tensor]] = []  # extremes of what something finite may be made of
        self._device: torch.device | None = None  # of what the layers are given

    def begin(self) -> None:
        super().begin()
        self._lost, self._asked = [], []

    def finished(self, made: torch.Tensor) -> torch.Tensor:
        """Return an output in float32; NaN where something finite was made of what had left the range."""
        made = made.float() if made.dtype is FP16 else made
        if not made.is_floating_point():
            return made
        if self._lost:
            made = made.masked_fill(_together(self._lost, made).any(), torch.nan)
        if self._asked:
            least, most = (_together(ends, made) for ends in zip(*self._asked, strict=True))
            masks = (least == -torch.inf) & (most <= 0)  # which are -inf in fp32 too
            made = made.masked_fill(~(((most - least) < torch.inf) | masks).all(), torch.nan)
        return made

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _MOVES or (func in _KEEPS_RANGE and not _is_bf16(args[0] if args else None)):
            return func(*args, **kwargs)
        if func in COPIES:
            made, summed = func(*args, **kwargs), self.next_key() in self._summed
            return made.float() if summed and made.dtype is FP16 else made
        if func in PRODUCTS:
            return self._times(func, args, kwargs)
        if func in NORMS:
            return self._norm(func, args, kwargs)
        if func in _SUMS and both_floating(args) and not kwargs:
            return self._sum(func, *args)
        if (func in _SUMS or func in _QUOTIENTS) and _by_number(func, args, kwargs):
            return func(*args)
        if func in _CASTS and _casts_alone(args, kwargs):
            to_float32 = func is _T.float or torch.float32 in (*args[1:], *kwargs.values())
            return args[0].clone() if self._copies and not to_float32 else args[0]
        self._look(made_finite(func, args, kwargs))
        return super().computed(func, args, kwargs)

    def _look(self, given: Any) -> None:
        """Note the extremes of a tensor that comes of layers. What a network makes of numbers may be on the host."""
        is_theirs = isinstance(given, torch.Tensor) and given.device == self._device
        if is_theirs and given.is_floating_point() and given.numel():
            self._asked.append(torch.aminmax(given.detach()))

    def _layer(self, func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        anchor = self.at_layer(weight)
        scale = self._plan.get((id(anchor), 0))
        if scale is None or self._anchors[id(anchor)]() is not anchor or not isinstance(input, torch.Tensor):
            return super()._layer(func, input, weight, bias, *args, **kwargs)
        self._device = input.device
        with autocast_off_where_on((input.device.type,)):
            if scale.loudness != 1 or weight.dtype is not FP16:
                weight = _times(weight, 1 / scale.loudness)
            if scale.half:
                bias = bias if bias is None else bias.to(FP16)
                return func(_times(input, scale.loudness), weight, bias, *args, **kwargs)
            half, factor = _times(input, 2.0**-scale.exponent), 2.0**scale.exponent * scale.loudness
            if func is F.linear:
                made = float32_product(half, weight)
            else:
                made = func(half, weight, None, *args, **kwargs)
            spatial = weight.ndim - 2
            self._lost.append(lost_digits(made, input, half, scale.least, spatial))
            if bias is None:
                return made.float().mul_(factor)
            return torch.add(bias.float().view(-1, *[1] * spatial), made, alpha=factor)

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = args[0] if args else kwargs.get("attn_mask")
        if not self._is_safe() or (mask is not None and mask.is_floating_point()):
            return super()._attention(query, key, value, *args, **kwargs)
        with autocast_off_where_on((query.device.type,)):
            return F.scaled_dot_product_attention(query.to(FP16), key.to(FP16), value.to(FP16), *args, **kwargs)

    def _is_safe(self) -> bool:
        """Return whether what is computed now stays in fp16's range."""
        at = self.next_key()
        scale = self._plan.get(at)
        return scale is not None and scale.half and at not in self._summed and self._is_there(at[0])

    def _is_there(self, anchor: int) -> bool:
        return anchor == 0 or self._anchors[anchor]() is not None

    def _norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Compute a norm in float32, and its weights with the cast to fp16 in one pass."""
        safe = self._is_safe()
        x, shape, weight, bias, eps = _NORMS[func](*args, **kwargs)
        held = [each for each in (x, weight, bias) if each is not None]
        if safe and func is not F.rms_norm and all(each.dtype is FP16 for each in held):
            return func(*args, **kwargs)
        made = func(x.float(), shape, eps=eps)
        if func is F.group_norm:
            weight, bias = (None if each is None else each.view(-1, *[1] * (x.ndim - 2)) for each in (weight, bias))
        return _affine(made, weight, bias, FP16 if safe else torch.float32)

    def _times(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not both_floating(args):
            plain = not kwargs and len(args) == 2 and all(_is_small(each) for each in args)
            return func(*args) if plain else Fp32Mode.computed(self, func, args, kwargs)
        if _is_bf16(args[0]) or _is_bf16(args[1]):
            self.next_key()
            return Fp32Mode.computed(self, func, args, kwargs)
        safe = self._is_safe() and args[0] is not args[1]  # a square may leave the range where its root does not
        halves = [each.dtype is FP16 for each in args[:2]]
        if safe or (not any(halves) and all(each.dtype is torch.float32 for each in args[:2])):
            return func(*args, **kwargs)
        if all(halves) and not kwargs:
            return _into_float32(torch.mul, *args)
        return Fp32Mode.computed(self, func, args, kwargs)

    def _sum(self, func: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype is b.dtype is FP16 and a.shape == b.shape:
            if func in _REVERSED:
                a, b = b, a
            return _into_float32(torch.sub if func in _DIFFERENCES else torch.add, a, b)
        to_widen = FP16 in (a.dtype, b.dtype) and 0 in (a.ndim, b.ndim)  # which a number's dtype does not
        if to_widen or _is_bf16(a) or _is_bf16(b):
            return Fp32Mode.computed(self, func, (a, b), {})
        return func(a, b)


@cache
def has_float32_products(device: torch.device) -> bool:
    """Return whether a device multiplies fp16 matrices into float32: NVIDIA's, by PyTorch 2.8 or later. The CPU has no
    such kernel, and computes the same numbers from float32 operands."""
    if device.type in ("cpu", "meta"):
        return True
    matrix = torch.zeros(8, 8, dtype=FP16, device=device)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # no such kernel, or no such argument
        return False
    return True


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x · weightᵀ in float32, without rounding it to fp16.

    x: [..., inputs] fp16. weight: [outputs, inputs] fp16.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu":
        made = rows.float() @ weight.float().t()
    else:
        made = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return made.view(*x.shape[:-1], len(weight))


def _together(numbers: Iterable[torch.Tensor], beside: torch.Tensor) -> torch.Tensor:
    """Return tensors [] as one [n] on the device of another."""
    return torch.stack([each.to(beside.device) for each in numbers])


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x · factor in fp16."""
    if factor == 1:
        return x.to(FP16)
    if x.device.type == "cpu":
        return (x.float() * factor).to(FP16)
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=FP16))


def _affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return x · weight + bias in a dtype, computed in float32."""
    if weight is None:
        return x.to(dtype)
    if x.device.type == "cpu":
        made = x * weight.float() if bias is None else torch.addcmul(bias.float(), x, weight.float())
        return made.to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    return torch.mul(x, weight, out=out) if bias is None else torch.addcmul(bias, x, weight, out=out)


def _into_float32(func: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.device.type == "cpu":
        return func(a.float(), b.float())
    shape = torch.broadcast_shapes(a.shape, b.shape)
    return func(a, b, out=torch.empty(shape, dtype=torch.float32, device=a.device))


def both_floating(args: tuple[Any, ...]) -> bool:
    return len(args) >= 2 and all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in args[:2])


def _is_bf16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16


def _is_small(value: Any) -> bool:
    """Return whether a tensor times a value stays in the range that fp16 has beyond ROOM."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and abs(value) <= 2.0**4)


def _by_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a sum of a tensor and a number, or a tensor over one, stays in the range beyond ROOM."""
    numbers = [each for each in args if isinstance(each, (int, float))]
    if (
        any(map(_is_bf16, args))
        or kwargs
        or len(args) != 2
        or len(numbers) != 1
        or (func in _QUOTIENTS and args[0] is numbers[0])
    ):
        return False
    return abs(numbers[0]) >= 2.0**-4 if func in _QUOTIENTS else abs(numbers[0]) <= 2.0**ROOM


def _casts_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a cast is between fp16 and float32, and does nothing else. Which of them a tensor has is decided
    here, and not by the network: where that asks, it sees float32."""
    asked = [*args[1:], *(value for name, value in kwargs.items() if name not in ("non_blocking", "copy"))]
    plain = all(each in (FP16, torch.bfloat16, torch.float32) for each in asked if isinstance(each, torch.dtype))
    return (
        plain
        and all(isinstance(each, torch.dtype) for each in asked)
        and isinstance(args[0], torch.Tensor)
        and args[0].dtype in (FP16, torch.float32)
        and not kwargs.get("copy")
    )


_T = torch.Tensor
_NORMS: dict[Any, Callable[..., Any]] = {  # what they are given, as (x, shape or groups, weight, bias, eps)
    F.layer_norm: lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: (  # noqa: A006 - as they name it
        (input, normalized_shape, weight, bias, eps)
    ),
    F.group_norm: lambda input, num_groups, weight=None, bias=None, eps=1e-5: (  # noqa: A006
        (input, num_groups, weight, bias, eps)
    ),
    F.rms_norm: lambda input, normalized_shape, weight=None, eps=None: (  # noqa: A006
        (input, normalized_shape, weight, None, eps)
    ),
}
NORMS = frozenset(_NORMS)
PRODUCTS = frozenset({torch.mul, torch.multiply, _T.mul, _T.multiply, _T.__mul__, _T.__rmul__})
_REVERSED = frozenset({_T.__rsub__})
_DIFFERENCES = frozenset({torch.sub, torch.subtract, _T.sub, _T.subtract, _T.__sub__, _T.__rsub__})
_SUMS = frozenset({torch.add, _T.add, _T.__add__, _T.__radd__}) | _DIFFERENCES
_QUOTIENTS = frozenset({torch.div, torch.true_divide, _T.div, _T.true_divide, _T.__truediv__})
_CASTS = frozenset({_T.to, _T.half, _T.bfloat16, _T.float})
COPIES = frozenset({torch.cat, torch.concat, torch.stack, torch.clone, _T.clone})
# what computes on no value
_MOVES = frozenset(
    {
        *(ALIASING - {_T.cuda, _T.cpu}), *METADATA,
        torch.chunk, torch.unbind, torch.flip, torch.roll,
        torch.repeat_interleave, torch.unflatten, _T.repeat, _T.repeat_interleave, _T.flip, _T.roll, _T.__setitem__,
        F.pad, F.dropout, F.pixel_shuffle, F.pixel_unshuffle,
        *(getattr(_T, name).__get__ for name in ("shape", "device", "ndim", "is_cuda", "requires_grad")),
    }
)  # fmt: skip
# what makes no value much larger than those that it is given, nor anything finite of one that is not
_KEEPS_RANGE = frozenset({F.silu, F.gelu, F.relu, F.interpolate, torch.neg, _T.neg, _T.__neg__})
