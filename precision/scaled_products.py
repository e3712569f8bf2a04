"""Scaled products: run any network, without knowing anything about it, with products in half precision and all else in
float32.

It is the fp32 rerun with other products. Each linear layer, convolution and fused attention multiplies in half
precision. In fp16, the operands are first scaled by powers of two, so that no sum of products leaves fp16's range, and
the float32 result is scaled back. These have a scale each: every row of a linear layer's input, every sample of a
convolution's input, and every channel of an attention head's queries, keys and values. Matrix products outside of
layers stay in float32, since rotary tables are made by them. A linear layer with quantised weights uses the kernel of
their format, if the caller has one that returns float32.

The values of a row can still be too far apart for fp16: small ones underflow. That is detected. On a CPU the product is
then computed in float32. On a device the host would have to wait for the answer, so the result becomes NaN there, and
the guard sees it.
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

from . import process_state
from .layer_peaks import error_of, sampled
from .upcast import Fp32Mode, OneOperation, autocast_off_where_on, dequantised, is_quantised

MAX_PRODUCT = 3e4  # the largest product of a scaled row: rounding on the way stays below 65504
MAX_SCALED_VALUE = 2.0**14  # of a scaled row's values, so that small ones beside the largest keep digits
MIN_PEAK = 2.0**-100  # lower bound of a row's maximum: float32 cannot hold the factor for a smaller one
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
LAYERS = (torch.nn.Linear, *CONVOLUTIONS)
NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)
_OUTSIDE = 16  # log2 of the part of attention's scale that its kernel multiplies by, in float32
_VALUES = 2.0**14  # that attention's values are scaled to; its output is no larger
_FLOAT32 = 110.0  # log2 of products of a query's channel with a key's whose sums fit in float32, whatever the head
_FEWER, _FEW, _NONE = 2.0**12, 2.0**24, 2.0**40  # a mask that is so far below 0 in a whole row costs logits digits
MIN_CHANNELS = 4  # rows with fewer channels may be near 0 by chance
MIN_NORMAL = 2.0**-14  # fp16's smallest normal number: a row whose maximum is below has fewer digits than in bf16
_CAST_SUM = 2.0**9  # weights that are cast anyway are scaled so that their largest sum of |w| is at most this
UNDERFLOW = 2.0**-13  # a row has underflowed if its product is below this share of the bound / sqrt(addends)
_FLUSHED_SUM = 2.0**-24  # times addends: share of the largest sum of |w| below which an output's weights underflow
_QUANTISED_MAX = 2.0**8  # rows of a quantised product are below, and reach half: fp8 ends at 448, fp16 can rotate it
# Given a quantised weight [outputs, inputs], returns its product: float32 [rows, inputs] below _QUANTISED_MAX →
# float32 [rows, outputs]; None without a kernel
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
    scale = _row_scale(absmax(x, tuple(range(-1 - spatial, 0))), limit)
    factor = scale.reciprocal()
    if x.dtype is torch.bfloat16:  # which holds every power of two
        factor = factor.to(x.dtype)
    made = product(scaled_to(x, factor, dtype))
    if loudness is not None:
        scale = scale * loudness
    if bias is None:
        return made * scale
    return torch.addcmul(bias.float().view(-1, *[1] * spatial), made, scale)


def absmax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return max |x| over dimensions, which are kept, in float32. On the CPU, a norm takes 30 times as long as two
    extremes."""
    if not x.numel():
        return x.new_zeros([1 if i - x.ndim in dims or i in dims else n for i, n in enumerate(x.shape)]).float()
    if x.device.type == "cpu":
        return torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True)).float()
    return torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True, dtype=torch.float32)


def row_dims(x: torch.Tensor, spatial: int) -> tuple[int, ...]:
    """Return the dimensions of a row: the channels. With fewer than MIN_CHANNELS, all dimensions, or those of a
    convolution's sample."""
    if x.shape[-1 - spatial] >= MIN_CHANNELS:
        return (-1 - spatial,)
    return tuple(range(-1 - spatial, 0)) if spatial else tuple(range(x.ndim))


def scaled_to(x: torch.Tensor, factor: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """Return x · factor in `dtype`, computed in float32: in one pass, except on the CPU, where that is 20 times as
    slow."""
    if not isinstance(factor, torch.Tensor):
        if factor == 1:
            return x.to(dtype)
    elif x.dtype is factor.dtype is dtype:
        return x * factor
    if x.device.type == "cpu" or torch.compiler.is_compiling():
        return (x.float() * factor).type(dtype)  # not `to`, which a mode would take for the network's own cast
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def input_limit(largest: torch.Tensor) -> torch.Tensor:
    """Return the bound of a scaled row's values with which no product leaves fp16's range. float32 [].

    largest: the largest of the weights' `output_bounds`.
    """
    return (MAX_PRODUCT / largest.clamp(min=MAX_PRODUCT / MAX_SCALED_VALUE)).log2().floor().exp2()


def output_bounds(weight: torch.Tensor) -> torch.Tensor:
    """Return the bound of each output for inputs of at most 1: the sum of |w|. float32 [outputs]."""
    return torch.linalg.vector_norm(weight.detach().flatten(1), 1, 1, dtype=torch.float32)


def _row_scale(largest: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return the power of two that rows which reach `largest` are divided by to stay below `limit`."""
    above = largest.clamp(min=MIN_PEAK).log2().floor() + 1.0
    return above.exp2() / limit


def no_kernel(_weight: torch.Tensor) -> None:
    """A KernelOf by which all quantised weights are dequantised."""


class _Bounds(NamedTuple):
    """Bounds within which attention in fp16 is accurate enough."""

    logits: int  # log2 of query channel · key channel · scale · √channels
    values: float  # the smallest token's peak as a share of the largest token's


_CAREFUL = _Bounds(6, 2.0**-10)  # always nearer to float32 than bf16 is; used where float32 is cheap
_BROADEST = _Bounds(18, 2.0**-28)  # nearer than bf16 on average; beyond, fp16 underflows


class ScaledHalfMatmulMode(Fp32Mode):
    """The mode that computes products in `dtype`, and all else in float32. It caches the bounds of weights, so keep it
    from call to call.

    kernel_of: for quantised weights; those without a kernel are dequantised.
    """

    def __init__(self, dtype: torch.dtype, kernel_of: KernelOf = no_kernel):
        super().__init__()
        self._kernel_of = kernel_of
        self._dtype = dtype
        self._scales = dtype is torch.float16
        self._bounds = _WeightBoundsCache()

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in LAYER_CALLS:
            return self._layer(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if isinstance(func, OneOperation) and func.for_products:
            self.before_cast(args[0] if args else next(iter(kwargs.values()), None))
            args, kwargs = func.for_products(self._dtype, *args, **kwargs)
            return func(*args, **kwargs)
        return super().compute(func, args, kwargs)

    def _layer(self, func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        self.before_layer(weight)
        if not (_is_float32_or_half(input) and _is_float32_or_half(weight) and weight.ndim > 1):
            return super().compute(func, (input, weight, bias, *args), kwargs)
        if func is F.linear and input.numel() and is_quantised(weight) and (kernel := self._kernel_of(weight)):
            return _by_kernel(kernel, input, bias)
        given, weight = weight, dequantised(weight)
        spatial = 0 if func is F.linear else weight.ndim - 2
        with autocast_off_where_on((input.device.type,)):
            if not self._scales:
                made = func(input.to(self._dtype), weight.to(self._dtype), None, *args, **kwargs).float()
                return made if bias is None else made + bias.float().view(-1, *[1] * spatial)
            half, of_weight, is_new = self._bounds.get(weight, self._dtype, transposed=func in _TRANSPOSED)
            looks = _is_on_host(input)
            loudness, lost = of_weight.weight_scale, None
            if is_new and not looks:
                loudness = torch.ones_like(of_weight.limit) if loudness is None else loudness.clone()

            def product(scaled: torch.Tensor) -> torch.Tensor:
                nonlocal lost
                made = func(scaled, half, None, *args, **kwargs)
                if is_new or looks:
                    with torch._C.DisableTorchFunction():  # other modes need not see a check
                        lost = has_underflowed(made, input, scaled, of_weight.min_product, spatial)
                if loudness is not None and lost is not None and not looks:
                    loudness.masked_fill_(lost, torch.nan)
                return made

            made = scaled_product(product, input, self._dtype, of_weight.limit, spatial, bias, loudness)
            if lost is None or not looks or not lost:
                if lost is not None and not looks:
                    self._bounds.poison(weight, lost)
                self.note(given, input, made, of_weight)
                return made
        self._bounds.discard(weight)
        return super().compute(func, (input, weight, bias, *args), kwargs)

    def forget_bounds(self) -> None:
        """Read each weight again at its next product."""
        self._bounds = _WeightBoundsCache()

    def before_cast(self, layer: Any) -> None:
        """Called before a layer's weights are cast."""

    def before_layer(self, weight: Any) -> None:
        """Called before each layer."""

    def note(self, weight: torch.Tensor, x: torch.Tensor, made: torch.Tensor, of_weight: WeightBounds) -> None:
        """Called after each scaled product of a layer."""

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
        if not all(_is_float32_or_half(each) and each.numel() for each in given[:3]):
            return super().compute(F.scaled_dot_product_attention, given, more)
        dtype, mask = self._dtype, attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
        with autocast_off_where_on((query.device.type,)):
            if not self._scales:
                half, keys, values = (each.to(dtype) for each in (query, key, value))
                if mask is not None:
                    attn_mask, top = _below_row_max(mask, dtype)
                    half = half.masked_fill(top <= -_FEW, 0.0)
                return F.scaled_dot_product_attention(
                    half, keys, values, attn_mask, dropout_p, is_causal, **more
                ).float()
            scaled = _scale(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, dtype)
            if _is_on_host(query):
                if not scaled.resolved:
                    return self._in_full(scaled.product, given, more)
                if mask is not None and (((top := _below_row_max(mask, dtype)[1]) < -_FEWER) & (top > -_NONE)).any():
                    return super().compute(F.scaled_dot_product_attention, given, more)
            return _attention_of(scaled, attn_mask, dropout_p, is_causal, enable_gqa)

    def _in_full(self, product: torch.Tensor, given: tuple[Any, ...], more: dict[str, Any]) -> torch.Tensor:
        """Compute attention as the fp32 rerun does; in float64 where logits overflow float32 too."""
        if product <= _FLOAT32:
            return super().compute(F.scaled_dot_product_attention, given, more)

        def double(part: Any) -> Any:
            return part.double() if isinstance(part, torch.Tensor) and part.is_floating_point() else part

        return F.scaled_dot_product_attention(*map(double, given), **more).float()


def dtype_of_products() -> torch.dtype | None:
    """Return the products' dtype of this thread's active ScaledHalfMatmulMode; None without one."""
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
    """Compute attention by scaled products in fp16; NaN where fp16 has too few digits for its operands. A compiler can
    trace it. float32."""
    scaled = _scale(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, torch.float16)
    return _attention_of(scaled, attn_mask, dropout_p, is_causal, enable_gqa)


def _attention_of(
    scaled: _Scaled, mask: torch.Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> torch.Tensor:
    query = scaled.query
    if mask is not None and mask.is_floating_point():
        mask, top = _below_row_max(mask, query.dtype)
        query = query.masked_fill(top <= -_FEW, 0.0)
    more: dict[str, Any] = {"scale": scaled.scale, "enable_gqa": enable_gqa}
    made = F.scaled_dot_product_attention(query, scaled.key, scaled.value, mask, dropout_p, is_causal, **more)
    return made * torch.where(scaled.resolved, scaled.value_scale, torch.nan)


def _by_kernel(
    kernel: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return a linear layer's output in float32, by a kernel that rounds its input to fewer bits: each row is scaled to
    fit them. The kernel may return finite numbers for a row that is not finite; its scale is not, so the result is not.

    x: [..., inputs], half precision or float32. bias: [outputs].
    """
    with autocast_off_where_on((x.device.type,)):
        made = scaled_product(
            kernel, x.reshape(-1, x.shape[-1]), torch.float32, scalar(_QUANTISED_MAX, x.device), bias=bias
        )
    return made.view(*x.shape[:-1], -1)


@cache
def scalar(value: float, device: torch.device) -> torch.Tensor:
    """Return a number as float32 [1], which makes one kernel compute on fp16 tensors in float32 and return float32."""
    with process_state.lasting():
        return torch.full((1,), value, device=device)


class _Scaled(NamedTuple):
    """Attention's operands, scaled for half precision."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    value_scale: torch.Tensor  # factor of the result. float32, of one token
    scale: float  # of the softmax
    product: torch.Tensor  # log2 of a bound of all products of a query's channel with a key's. float32 []
    resolved: torch.Tensor  # bool []: half precision is as accurate here as bf16


def _scale(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, dtype: torch.dtype) -> _Scaled:
    """Scale queries, keys and values by powers of two, one for each channel of a head.

    A channel's queries are multiplied by the factor that its keys are divided by, so that both have the same maximum
    and their product stays as it is. Besides, both are multiplied by 2^-8, and the kernel multiplies their float32
    product by 2^16. Queries and keys of up to 2^23 are then below 2^15, and a token of 1 beside them is above 2^-9.
    """
    by_head = query.shape[:-2] == key.shape[:-2]
    queries, keys = _channel_exponents(query, by_head=by_head), _channel_exponents(key, by_head=by_head)
    size = abs(scale) * query.shape[-1] ** 0.5
    inside = math.floor(math.log2(size)) if 0 < size < math.inf else 0  # the scale's power of two goes into both
    product = (queries + keys).amax()
    of_query = ((keys - queries + (inside - _OUTSIDE)) / 2).floor()
    of_key = inside - _OUTSIDE - of_query
    by_head = query.shape[:-2] == value.shape[:-2]
    loudness = _channel_exponents(value, by_head=by_head).exp2() / _VALUES
    tokens, dims = absmax(value, (-1,)), _shared_dims(value, by_head=by_head)
    smallest = torch.where(tokens > 0, tokens, torch.inf).amin(dims)
    bounds = _CAREFUL if _is_on_host(query) else _BROADEST
    return _Scaled(
        scaled_to(query, of_query.exp2(), dtype),
        scaled_to(key, of_key.exp2(), dtype),
        scaled_to(value, 1 / loudness, dtype),
        loudness,
        scale * 2.0 ** (_OUTSIDE - inside),
        product,
        (product + inside <= bounds.logits) & (smallest >= tokens.amax(dims) * bounds.values).all(),
    )


def _below_row_max(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an additive mask in `dtype`, minus the maximum of each row, and these maxima (float32 [..., 1]). That
    leaves the softmax as it is: the entries that count are near 0, where half precision is exact."""
    mask = mask.float()
    top = mask.amax(-1, keepdim=True)
    return (mask - top.clamp(min=torch.finfo(torch.float32).min)).to(dtype), top


def _is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the host can read a value of the tensor without waiting: neither on a device nor compiled."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


class _WeightBoundsCache:
    """Caches the bounds of weights. A parameter is read once, and again when its version or address changes. A change
    through `.data`, or of a parameter made in inference mode, is not noticed; if it leads out of the range, the product
    is not finite, and `LearnedProducts.renew` has all weights read again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[weakref.ref[torch.Tensor], tuple[int, int], WeightBounds]] = {}

    def get(
        self, weight: torch.Tensor, dtype: torch.dtype, *, transposed: bool
    ) -> tuple[torch.Tensor, WeightBounds, bool]:
        """Return the weight in `dtype`, its bounds, and whether they were read just now."""
        state = version_of(weight)
        found = self._known.get((id(weight), transposed))
        is_new = not (found and found[0]() is weight and found[1] == state)
        if found and not is_new:
            made = found[2]
        elif isinstance(weight, torch.nn.Parameter):
            with process_state.lasting():
                made = weight_bounds(weight, dtype, transposed=transposed)
            self._known[id(weight), transposed] = weakref.ref(weight), state, made
        else:
            made = weight_bounds(weight, dtype, transposed=transposed)
        half = weight if made.inverse_scale is None else scaled_to(weight, made.inverse_scale, dtype)
        return half, made, is_new

    def discard(self, weight: torch.Tensor) -> None:
        """Read a weight again at its next product."""
        for transposed in (False, True):
            self._known.pop((id(weight), transposed), None)

    def poison(self, weight: torch.Tensor, lost: torch.Tensor) -> None:
        """Make all later products with a weight NaN if `lost`, a bool [] on its device, is true."""
        for transposed in (False, True):
            if found := self._known.get((id(weight), transposed)):
                with process_state.lasting():
                    limit = torch.where(lost, torch.nan, found[2].limit)
                self._known[id(weight), transposed] = *found[:2], found[2]._replace(limit=limit)


def version_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's version counter and address, which change with its values. Tensors of inference mode, as
    ComfyUI's are, have no version counter."""
    try:
        return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()
    except RuntimeError:  # a tensor subclass without memory
        return 0, 0


class WeightBounds(NamedTuple):
    """The bounds of a weight: of the rows that it multiplies, and the divisor for its cast. All are float32 [];
    weight_scale, and its reciprocal inverse_scale, are None for 1."""

    limit: torch.Tensor
    min_product: torch.Tensor  # a scaled row whose product is smaller has underflowed; infinite if the cast weight has
    weight_scale: torch.Tensor | None = None
    inverse_scale: torch.Tensor | None = None


def weight_bounds(weight: torch.Tensor, dtype: torch.dtype, *, transposed: bool) -> WeightBounds:
    by_output = weight.transpose(0, 1) if transposed else weight
    addends = max(1, by_output[:1].numel())
    sums = output_bounds(by_output)
    largest = sums.amax() if len(sums) else sums.new_zeros(())
    if weight.dtype is dtype:
        return WeightBounds(input_limit(largest), largest * UNDERFLOW * addends**-0.5)
    loudness = torch.where(largest > 0, (largest.clamp(min=MIN_PEAK).log2().floor() + 1).exp2() / _CAST_SUM, 1.0)
    least = largest / loudness * UNDERFLOW * addends**-0.5
    if _is_on_host(weight) and ((sums < largest * (addends * _FLUSHED_SUM)) & (sums > 0)).any():
        least = least + torch.inf
    return WeightBounds(input_limit(largest / loudness), least, loudness, 1 / loudness)


def has_underflowed(
    made: torch.Tensor, given: torch.Tensor, scaled: torch.Tensor, least: torch.Tensor | float, spatial: int
) -> torch.Tensor:
    """Return whether a product shows that small values of its input underflowed, or is not finite. bool [].

    Beside a value a million times as large, small ones underflow when the row is scaled. That matters where the weight
    of the large value is near 0, and shows as a small output of the row. A convolution's product is fp16, so it also
    underflows where it is small itself.
    """
    if spatial and made.dtype is torch.float16 and isinstance(least, torch.Tensor):
        least = torch.where(least > 0, least.clamp(min=MIN_NORMAL), least)
    size = absmax(made, row_dims(made, spatial) if spatial else (-1,))
    small = ~((size >= least) & (size < torch.inf))
    if _is_on_host(made) and not small.any():
        return small.any()
    if not spatial:
        return (small & (absmax(given, (-1,)) != 0)).any()
    vanished = scaled.count_nonzero() < given.count_nonzero()  # else an output of 0 may be right
    return (small & (size != 0)).any() | (small.any() & vanished)


@torch.no_grad()
def error_relative_to_bf16(layer: Any, x: Any) -> torch.Tensor:
    """Return the error of a linear layer's or a convolution's scaled fp16 product divided by that of its bf16 product:
    above 1, small values underflow beside large ones. float32 []; 0 for other layers, and for weights on "meta".

    x: the layer's input, in float32. A sample of a linear layer's rows is used.
    """
    if not (isinstance(layer, LAYERS) and _is_float32_or_half(x) and x.numel() and not layer.weight.is_meta):
        return torch.zeros(())
    weight = dequantised(layer.weight).to(x.device)
    weight = weight.float() if weight.itemsize < 2 else weight
    if not _is_float32_or_half(weight):
        return torch.zeros((), device=x.device)
    product: Any = getattr(layer, "_conv_forward", F.linear)
    spatial = weight.ndim - 2
    rows = x if spatial else sampled(x.reshape(-1, x.shape[-1]))
    found = weight_bounds(weight, torch.float16, transposed=False)
    half = weight if found.inverse_scale is None else scaled_to(weight, found.inverse_scale, torch.float16)
    with autocast_off_where_on((x.device.type,)):
        how = (rows, torch.float16, found.limit, spatial)
        fp16 = scaled_product(lambda scaled: product(scaled, half, None), *how, loudness=found.weight_scale)
        bf16, right = (product(rows.to(dtype), weight.to(dtype), None) for dtype in (torch.bfloat16, torch.float32))
    by_channel = [each.float().movedim(-1 - spatial, -1).flatten(0, -2) for each in (fp16, bf16, right)]
    one, other = (error_of(made, by_channel[-1]) for made in by_channel[:2])
    return (one / other).nan_to_num(nan=0.0, posinf=torch.inf)


def _is_float32_or_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _channel_exponents(values: torch.Tensor, *, by_head: bool) -> torch.Tensor:
    """Return log2 of a power of two above all |x| of a channel. float32 [..., 1, channels]."""
    return absmax(values, _shared_dims(values, by_head=by_head)).clamp(min=MIN_PEAK).log2().floor() + 1


def _shared_dims(values: torch.Tensor, *, by_head: bool) -> tuple[int, ...]:
    """Return the dimensions that share a scale besides channels: tokens, and heads unless by_head."""
    return (-2,) if by_head else tuple(range(values.ndim - 1))


_TRANSPOSED = frozenset({F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d})
LAYER_CALLS = frozenset({F.linear, F.conv1d, F.conv2d, F.conv3d}) | _TRANSPOSED
