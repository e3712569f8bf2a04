"""Every layer scaled: products in half precision, all else in float32, in any network and with nothing known about it.

It is the fp32 rerun with other products. Each linear layer, convolution and fused attention multiplies in half
precision. Where that is fp16, its operands are scaled by powers of two before, such that no sum of products leaves
fp16's range, and the float32 result is scaled back. What has a scale of its own is each row of a linear layer's input,
each sample of a convolution's, and each channel of the queries, keys and values of an attention head. Matrix products
outside of layers stay in float32: rotary tables are made by such. A linear layer with quantised weights multiplies by
the kernel of their format, where whoever runs the network has one that gives float32.

Values can be too far apart for fp16 all the same. What is lost then is looked for: on a CPU the product is made in
float32 instead. On a device the host would have to wait to choose, so there the result is NaN, for the guard to see.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from . import shared
from .observe import error_of, sampled
from .upcast import Fp32Mode, OneOperation, autocast_off_where_on, dequantised, is_quantised

ROOM = 3e4  # of fp16's 65504: the largest product of a scaled row, so that rounding on the way does not pass the end
LARGEST = 2.0**14  # of a scaled row's values, so that small ones beside the largest keep digits
LEAST = 2.0**-100  # what a row's largest value counts for at least: float32 does not hold what would scale up a smaller
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
LAYERS = (torch.nn.Linear, *CONVOLUTIONS)
NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)
_OUTSIDE = 16  # log2 of the part of attention's scale that its kernel multiplies by, in float32
_VALUES = 2.0**14  # of attention's values; what comes out is no larger
_FLOAT32 = 110.0  # log2 of products of a query's channel with a key's whose sums fit in float32, whatever the head
_FEWER, _FEW, _NONE = 2.0**12, 2.0**24, 2.0**40  # taken from all logits of a row, leaves float32 fewer digits of them
FEW = 4  # channels of a row, of which the largest may be near to 0 by chance
FAINT = 2.0**-14  # a row whose largest value is smaller has fewer digits in fp16 than in bf16, or soon will
_NORMAL = 2.0**9  # the largest sum of |w| of weights that have to be cast anyway: they are scaled to that
LOST = 2.0**-13  # of what a layer's product may reach, times the root of its addends: less shows what fp16 flushed
_FLUSHED = 2.0**-24  # of the largest sum of |w|, times the addends: an output with less loses weights that are cast
_ROUNDED = 2.0**8  # rows of a quantised product reach half of it, and never it: fp8 ends at 448, fp16 can rotate it
# of a quantised weight [outputs, inputs]: what multiplies rows by it. Given float32 [rows, inputs] below _ROUNDED,
# returns float32 [rows, outputs]. None where there is no such kernel
KernelOf = Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor] | None]


def scaled_product(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    dtype: torch.dtype,
    limit: torch.Tensor,
    spatial: int = 0,
    bias: torch.Tensor | None = None,
    loudness: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a layer's output in float32, by a product in half precision that stays in its range.

    product: the layer's product without its bias. Takes and returns `dtype`.
    x: [..., channels, *spatial], of any floating dtype.
    limit: what the values of a scaled row may reach. float32 [].
    spatial: how many dimensions there are behind the channels.
    bias: [channels], of any floating dtype; None where there is none.
    loudness: what the product has to be multiplied by beside. float32 []; None: 1.
    """
    scale = _scale(largest_of(x, tuple(range(-1 - spatial, 0))), limit)
    factor = scale.reciprocal()
    if x.dtype is torch.bfloat16:  # which holds every power of two
        factor = factor.to(x.dtype)
    made = product(times(x, factor, dtype))
    if loudness is not None:
        scale = scale * loudness
    if bias is None:
        return made * scale
    return torch.addcmul(bias.float().view(-1, *[1] * spatial), made, scale)


def largest_of(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return max |x| over dimensions, which are kept, in float32. On the CPU, a norm takes 30 times as long as two
    extremes."""
    if not x.numel():
        return x.new_zeros([1 if i - x.ndim in dims or i in dims else n for i, n in enumerate(x.shape)]).float()
    if x.device.type == "cpu":
        return torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True)).float()
    return torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True, dtype=torch.float32)


def row_of(x: torch.Tensor, spatial: int) -> tuple[int, ...]:
    """Return the dimensions of a row: its channels; where these are few, which may be near to 0 by chance, all; of a
    convolution, all of a sample."""
    if x.shape[-1 - spatial] >= FEW:
        return (-1 - spatial,)
    return tuple(range(-1 - spatial, 0)) if spatial else tuple(range(x.ndim))


def times(x: torch.Tensor, factor: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """Return x · factor in `dtype`, computed in float32: in one pass, but for the CPU, where that takes 20 times as
    long."""
    if not isinstance(factor, torch.Tensor):
        if factor == 1:
            return x.to(dtype)
    elif x.dtype is factor.dtype is dtype:
        return x * factor
    if x.device.type == "cpu" or torch.compiler.is_compiling():
        return (x.float() * factor).type(dtype)  # which no mode takes for the network's own cast
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def limit_of(largest: torch.Tensor) -> torch.Tensor:
    """Return what the values of a scaled row may reach, so that no product leaves fp16's range. float32 [].

    largest: of what `reaches` says of the weights.
    """
    return (ROOM / largest.clamp(min=ROOM / LARGEST)).log2().floor().exp2()


def reaches(weight: torch.Tensor) -> torch.Tensor:
    """Return the most that each output may be where inputs are at most 1: the sum of |w|. float32 [outputs]."""
    return torch.linalg.vector_norm(weight.detach().flatten(1), 1, 1, dtype=torch.float32)


def _scale(largest: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return the power of two that rows which reach `largest` are divided by to stay below `limit`."""
    above = largest.clamp(min=LEAST).log2().floor() + 1.0
    return above.exp2() / limit


def no_kernel(_weight: torch.Tensor) -> None:
    """A KernelOf by which all quantised weights are dequantised."""


class _Bounds(NamedTuple):
    """Up to where attention in fp16 is taken for right."""

    logits: int  # log2 of a query's channel times a key's times scale · √channels, which logits are a few of
    values: float  # the smallest token's values, beside the largest token's


_CAREFUL = _Bounds(6, 2.0**-10)  # nearer to float32 than bf16 in each single case; where float32 costs little
_BROADEST = _Bounds(18, 2.0**-28)  # nearer than bf16 on average; beyond, fp16 flushes what counts


class ScaledHalfMatmulMode(Fp32Mode):
    """The mode in which products are computed in `dtype`, and all else in float32. It remembers what weights reach,
    which costs reading them once: it is to be kept from call to call.

    kernel_of: for quantised weights, which are dequantised where it has none.
    """

    def __init__(self, dtype: torch.dtype, kernel_of: KernelOf = no_kernel):
        super().__init__()
        self._kernel_of = kernel_of
        self._dtype = dtype
        self._scales = dtype is torch.float16
        self._limits = _Limits()

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in LAYER_CALLS:
            return self._layer(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if isinstance(func, OneOperation) and func.for_products:
            self.casts_for(args[0] if args else next(iter(kwargs.values()), None))
            args, kwargs = func.for_products(self._dtype, *args, **kwargs)
            return func(*args, **kwargs)
        return super().computed(func, args, kwargs)

    def _layer(self, func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        self.begin_layer(weight)
        if not (_is_single(input) and _is_single(weight) and weight.ndim > 1):
            return super().computed(func, (input, weight, bias, *args), kwargs)
        if func is F.linear and input.numel() and is_quantised(weight) and (kernel := self._kernel_of(weight)):
            return _by_kernel(kernel, input, bias)
        given, weight = weight, dequantised(weight)
        spatial = 0 if func is F.linear else weight.ndim - 2
        with autocast_off_where_on((input.device.type,)):
            if not self._scales:
                made = func(input.to(self._dtype), weight.to(self._dtype), None, *args, **kwargs).float()
                return made if bias is None else made + bias.float().view(-1, *[1] * spatial)
            half, of_weight, is_new = self._limits.of(weight, self._dtype, transposed=func in _TRANSPOSED)
            looks = _can_look(input)
            loudness, lost = of_weight.loudness, None
            if is_new and not looks:
                loudness = torch.ones_like(of_weight.limit) if loudness is None else loudness.clone()

            def product(scaled: torch.Tensor) -> torch.Tensor:
                nonlocal lost
                made = func(scaled, half, None, *args, **kwargs)
                if is_new or looks:
                    with torch._C.DisableTorchFunction():  # no other mode need see a look
                        lost = lost_digits(made, input, scaled, of_weight.least, spatial)
                if loudness is not None and lost is not None and not looks:
                    loudness.masked_fill_(lost, torch.nan)
                return made

            made = scaled_product(product, input, self._dtype, of_weight.limit, spatial, bias, loudness)
            if lost is None or not looks or not lost:
                if lost is not None and not looks:
                    self._limits.doubt(weight, lost)
                self.note(given, input, made, of_weight)
                return made
        self._limits.forget(weight)
        return super().computed(func, (input, weight, bias, *args), kwargs)

    def casts_for(self, layer: Any) -> None:
        """Told of a layer whose weights are cast next."""

    def begin_layer(self, weight: Any) -> None:
        """Told of each layer that is computed."""

    def note(self, weight: torch.Tensor, x: torch.Tensor, made: torch.Tensor, of_weight: Limit) -> None:
        """Told of each scaled product of a layer."""

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        more: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if not all(_is_single(each) and each.numel() for each in given[:3]):
            return super().computed(F.scaled_dot_product_attention, given, more)
        dtype, mask = self._dtype, attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
        with autocast_off_where_on((query.device.type,)):
            if not self._scales:
                half, keys, values = (each.to(dtype) for each in (query, key, value))
                if mask is not None:
                    attn_mask, top = _shifted(mask, dtype)
                    half = half.masked_fill(top <= -_FEW, 0.0)
                return F.scaled_dot_product_attention(
                    half, keys, values, attn_mask, dropout_p, is_causal, **more
                ).float()
            scaled = _scaled(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, dtype)
            if _can_look(query):
                if not scaled.resolved:
                    return self._in_full(scaled.product, given, more)
                if mask is not None and (((top := _shifted(mask, dtype)[1]) < -_FEWER) & (top > -_NONE)).any():
                    return super().computed(F.scaled_dot_product_attention, given, more)
            return _attended(scaled, attn_mask, dropout_p, is_causal, enable_gqa)

    def _in_full(self, product: torch.Tensor, given: tuple[Any, ...], more: dict[str, Any]) -> torch.Tensor:
        """Compute attention as the fp32 rerun does, and in float64 where logits leave float32 as well."""
        if product <= _FLOAT32:
            return super().computed(F.scaled_dot_product_attention, given, more)

        def double(part: Any) -> Any:
            return part.double() if isinstance(part, torch.Tensor) and part.is_floating_point() else part

        return F.scaled_dot_product_attention(*map(double, given), **more).float()


def dtype_of_products() -> torch.dtype | None:
    """Return what such a mode multiplies in that computes in this thread now; None where there is none."""
    modes = (mode for mode in _get_current_function_mode_stack() if isinstance(mode, ScaledHalfMatmulMode))
    return next((mode._dtype for mode in modes), None)


def scaled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention by products in fp16, whatever its operands reach: NaN where fp16 does not resolve them. A
    compiler can trace it. float32."""
    scaled = _scaled(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, torch.float16)
    return _attended(scaled, attn_mask, dropout_p, is_causal, enable_gqa)


def _attended(
    scaled: _Scaled, mask: torch.Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> torch.Tensor:
    query = scaled.query
    if mask is not None and mask.is_floating_point():
        mask, top = _shifted(mask, query.dtype)
        query = query.masked_fill(top <= -_FEW, 0.0)
    more: dict[str, Any] = {"scale": scaled.scale, "enable_gqa": enable_gqa}
    made = F.scaled_dot_product_attention(query, scaled.key, scaled.value, mask, dropout_p, is_causal, **more)
    return made * torch.where(scaled.resolved, scaled.loudness, torch.nan)


def _by_kernel(
    kernel: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return a linear layer's output in float32, by a product that rounds its rows to fewer bits: each is scaled to fit
    these. What it makes of a row that is not finite may be, and is multiplied by a scale that is not.

    x: [..., inputs], half precision or float32. bias: [outputs].
    """
    with autocast_off_where_on((x.device.type,)):
        made = scaled_product(kernel, x.reshape(-1, x.shape[-1]), torch.float32, number(_ROUNDED, x.device), bias=bias)
    return made.view(*x.shape[:-1], -1)


@cache
def number(value: float, device: torch.device) -> torch.Tensor:
    """Return a number as float32 [1]. With it, one kernel computes on fp16 tensors in float32, and gives that."""
    with shared.lasting():
        return torch.full((1,), value, device=device)


class _Scaled(NamedTuple):
    """What attention multiplies in half precision."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    loudness: torch.Tensor  # what the result is multiplied by. float32, of one token
    scale: float  # the softmax's
    product: torch.Tensor  # log2 of what no product of a query's channel with a key's reaches. float32 []
    resolved: torch.Tensor  # bool []: whether half precision resolves the call as well as bf16 does


def _scaled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, dtype: torch.dtype) -> _Scaled:
    """Scale queries, keys and values by powers of two, each channel of a head by its own.

    A channel's queries are multiplied by what its keys are divided by, such that both reach the same: that leaves their
    product as it is. Both are made smaller by 2^-8 beside, and the kernel multiplies their float32 product by 2^16.
    So queries and keys that reach 2^23 are below 2^15, and a token of 1 beside these is above 2^-9.
    """
    by_head = query.shape[:-2] == key.shape[:-2]
    queries, keys = _exponent(query, by_head=by_head), _exponent(key, by_head=by_head)
    size = abs(scale) * query.shape[-1] ** 0.5
    inside = math.floor(math.log2(size)) if 0 < size < math.inf else 0  # the scale's power of two goes into both
    product = (queries + keys).amax()
    of_query = ((keys - queries + (inside - _OUTSIDE)) / 2).floor()
    of_key = inside - _OUTSIDE - of_query
    by_head = query.shape[:-2] == value.shape[:-2]
    loudness = _exponent(value, by_head=by_head).exp2() / _VALUES
    tokens, dims = largest_of(value, (-1,)), _dims(value, by_head=by_head)
    smallest = torch.where(tokens > 0, tokens, torch.inf).amin(dims)
    bounds = _CAREFUL if _can_look(query) else _BROADEST
    return _Scaled(
        times(query, of_query.exp2(), dtype),
        times(key, of_key.exp2(), dtype),
        times(value, 1 / loudness, dtype),
        loudness,
        scale * 2.0 ** (_OUTSIDE - inside),
        product,
        (product + inside <= bounds.logits) & (smallest >= tokens.amax(dims) * bounds.values).all(),
    )


def _shifted(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an additive mask in `dtype`, and the largest value of each row, which was taken from it. That changes no
    softmax: what has a share is near 0, where half precision is exact. float32 [..., 1]."""
    mask = mask.float()
    top = mask.amax(-1, keepdim=True)
    return (mask - top.clamp(min=torch.finfo(torch.float32).min)).to(dtype), top


def _can_look(tensor: torch.Tensor) -> bool:
    """Return whether the host can read a number without waiting for a device. Compiled code has no host."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


class _Limits:
    """How large the values of a row may be that is multiplied by a weight. A parameter is read once, and again where it
    is seen to have changed. A change through `.data`, or of one that was made in inference mode, is not seen: where
    that leads out of the range, the product is not finite."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[weakref.ref[torch.Tensor], tuple[int, int], Limit]] = {}

    def of(self, weight: torch.Tensor, dtype: torch.dtype, *, transposed: bool) -> tuple[torch.Tensor, Limit, bool]:
        """Return the weight in `dtype`, what its products may reach, and whether that was read just now."""
        state = state_of(weight)
        found = self._known.get((id(weight), transposed))
        is_new = not (found and found[0]() is weight and found[1] == state)
        if found and not is_new:
            made = found[2]
        elif isinstance(weight, torch.nn.Parameter):
            with shared.lasting():
                made = limit(weight, dtype, transposed=transposed)
            self._known[id(weight), transposed] = weakref.ref(weight), state, made
        else:
            made = limit(weight, dtype, transposed=transposed)
        half = weight if made.quieter is None else times(weight, made.quieter, dtype)
        return half, made, is_new

    def forget(self, weight: torch.Tensor) -> None:
        """Have a weight read anew when it is next multiplied by."""
        for transposed in (False, True):
            self._known.pop((id(weight), transposed), None)

    def doubt(self, weight: torch.Tensor, lost: torch.Tensor) -> None:
        """Have all later products with a weight be NaN where `lost`, a bool [] on its device, says so."""
        for transposed in (False, True):
            if found := self._known.get((id(weight), transposed)):
                with shared.lasting():
                    limit = torch.where(lost, torch.nan, found[2].limit)
                self._known[id(weight), transposed] = *found[:2], found[2]._replace(limit=limit)


def state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what tells that a tensor was changed: how often it was written to, which is not known of one that was made
    in inference mode, as ComfyUI's are; and where its memory is."""
    try:
        return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()
    except RuntimeError:  # it has no memory: of a class of its own
        return 0, 0


class Limit(NamedTuple):
    """What rows may reach that are multiplied by a weight, and what the weight is divided by to be cast. All are
    float32 []; loudness, and quieter, its reciprocal, are None for 1."""

    limit: torch.Tensor
    least: torch.Tensor  # a scaled row's product that is smaller shows what was lost; infinite where weights were
    loudness: torch.Tensor | None = None
    quieter: torch.Tensor | None = None


def limit(weight: torch.Tensor, dtype: torch.dtype, *, transposed: bool) -> Limit:
    by_output = weight.transpose(0, 1) if transposed else weight
    addends = max(1, by_output[:1].numel())
    sums = reaches(by_output)
    largest = sums.amax() if len(sums) else sums.new_zeros(())
    if weight.dtype is dtype:
        return Limit(limit_of(largest), largest * LOST * addends**-0.5)
    loudness = torch.where(largest > 0, (largest.clamp(min=LEAST).log2().floor() + 1).exp2() / _NORMAL, 1.0)
    least = largest / loudness * LOST * addends**-0.5
    if _can_look(weight) and ((sums < largest * (addends * _FLUSHED)) & (sums > 0)).any():
        least = least + torch.inf
    return Limit(limit_of(largest / loudness), least, loudness, 1 / loudness)


def lost_digits(
    made: torch.Tensor, given: torch.Tensor, scaled: torch.Tensor, least: torch.Tensor | float, spatial: int
) -> torch.Tensor:
    """Return whether a product shows that small values of its input lost digits, or is not finite. bool [].

    Beside a value a million times as large, they lose some when the row is scaled. That shows where the large one is
    multiplied by next to nothing, so that little comes out of the row. A convolution's product loses some as well where
    it is small in fp16 itself.
    """
    if spatial and made.dtype is torch.float16 and isinstance(least, torch.Tensor):
        least = torch.where(least > 0, least.clamp(min=FAINT), least)
    size = largest_of(made, row_of(made, spatial) if spatial else (-1,))
    small = ~((size >= least) & (size < torch.inf))
    if _can_look(made) and not small.any():
        return small.any()
    if not spatial:
        return (small & (largest_of(given, (-1,)) != 0)).any()
    vanished = scaled.count_nonzero() < given.count_nonzero()  # elsewhere, an output of 0 may come of an input of 0
    return (small & (size != 0)).any() | (small.any() & vanished)


@torch.no_grad()
def error_beside_bf16(layer: Any, x: Any) -> torch.Tensor:
    """Return how far a linear layer's or a convolution's scaled product in fp16 is off, as a share of how far bf16's
    product is: above 1, fp16 loses small values beside large ones. float32 []; 0 for other layers, and for weights that
    are not at hand.

    x: what the layer is given, in float32. Of a linear layer's rows, some are multiplied.
    """
    if not (isinstance(layer, LAYERS) and _is_single(x) and x.numel() and not layer.weight.is_meta):
        return torch.zeros(())
    weight = dequantised(layer.weight).to(x.device)
    weight = weight.float() if weight.itemsize < 2 else weight
    if not _is_single(weight):
        return torch.zeros((), device=x.device)
    product: Any = getattr(layer, "_conv_forward", F.linear)
    spatial = weight.ndim - 2
    rows = x if spatial else sampled(x.reshape(-1, x.shape[-1]))
    found = limit(weight, torch.float16, transposed=False)
    half = weight if found.quieter is None else times(weight, found.quieter, torch.float16)
    with autocast_off_where_on((x.device.type,)):
        how = (rows, torch.float16, found.limit, spatial)
        fp16 = scaled_product(lambda scaled: product(scaled, half, None), *how, loudness=found.loudness)
        bf16, right = (product(rows.to(dtype), weight.to(dtype), None) for dtype in (torch.bfloat16, torch.float32))
    by_channel = [each.float().movedim(-1 - spatial, -1).flatten(0, -2) for each in (fp16, bf16, right)]
    one, other = (error_of(made, by_channel[-1]) for made in by_channel[:2])
    return (one / other).nan_to_num(nan=0.0, posinf=torch.inf)


def _is_single(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _exponent(values: torch.Tensor, *, by_head: bool) -> torch.Tensor:
    """Return log2 of powers of two that no |x| of a channel reaches. float32 [..., 1, channels]."""
    return largest_of(values, _dims(values, by_head=by_head)).clamp(min=LEAST).log2().floor() + 1


def _dims(values: torch.Tensor, *, by_head: bool) -> tuple[int, ...]:
    """Return the dimensions that share a scale, beside channels: tokens, and heads where these are not told apart."""
    return (-2,) if by_head else tuple(range(values.ndim - 1))


_TRANSPOSED = frozenset({F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d})
LAYER_CALLS = frozenset({F.linear, F.conv1d, F.conv2d, F.conv3d}) | _TRANSPOSED
