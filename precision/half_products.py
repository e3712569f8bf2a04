"""Everything wide: products in half precision, all else in float32, in any network and with nothing known about it.

It is the fp32 rerun with other products. Each linear layer, convolution and fused attention multiplies in half
precision. Where that is fp16, its operands are scaled by powers of two before, such that no sum of products leaves
fp16's range, and the float32 result is scaled back. What has a scale of its own is each row of a linear layer's input,
each sample of a convolution's, and each head of attention's queries, keys and values. Matrix products outside of layers
stay in float32: rotary tables are made by such.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional as F

from .fp32_settings import autocast_off_where_on
from .upcast import Fp32Mode, OneOperation, dequantised, run_in
from .wide import LEAST, largest_of, limit_of, reach, scaled_product, times

Result = TypeVar("Result")
_SOFTMAX_ROOM = 14  # log2 of what a query's and a key's values are kept below, so that their product fits in float32
_VALUES = 2.0**8  # of attention's values; what comes out is no larger
_NORMAL = 2.0**7  # the largest sum of |w| of weights that have to be cast anyway: they are scaled to that
_BIASED = 6e4  # the end of an additive mask in half: what is below has no share all the same


def run_with_half_products(
    function: Callable[..., Result], *args: Any, products: HalfProducts, tf32: bool = False, **kwargs: Any
) -> Result:
    """Call `function` (a module or any callable that runs modules) with products in half precision and all else in
    float32. Otherwise it does what `run_in_fp32` does, with the same arguments and errors.

    products: to be kept from call to call, since it remembers what weights reach.
    """
    return run_in(products, function, args, kwargs, tf32=tf32)


class HalfProducts(Fp32Mode):
    """The mode in which products are computed in `dtype`, and all else in float32. It remembers what weights reach,
    which costs reading them once."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype
        self._scales = dtype is torch.float16
        self._limits = _Limits()

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _LAYERS:
            return self._layer(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if isinstance(func, OneOperation) and func.for_products:
            args, kwargs = func.for_products(self._dtype, *args, **kwargs)
            return func(*args, **kwargs)
        return super().computed(func, args, kwargs)

    def _layer(self, func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        if not (_is_single(input) and _is_single(weight)):
            return super().computed(func, (input, weight, bias, *args), kwargs)
        weight = dequantised(weight)
        spatial = 0 if func is F.linear else weight.ndim - 2
        with autocast_off_where_on((input.device.type,)):
            if not self._scales:
                made = func(input.to(self._dtype), weight.to(self._dtype), None, *args, **kwargs).float()
                return made if bias is None else made + bias.float().view(-1, *[1] * spatial)
            half, loudness, limit = self._limits.of(weight, self._dtype, transposed=func in _TRANSPOSED)

            def product(scaled: torch.Tensor) -> torch.Tensor:
                return func(scaled, half, None, *args, **kwargs)

            return scaled_product(product, input, self._dtype, limit, spatial, bias, loudness)

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
        dtype, loudness = self._dtype, None
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float().clamp(-_BIASED, _BIASED).to(dtype)
        if self._scales:
            query, key = _level(query, key, query.shape[-1] ** -0.5 if scale is None else scale, dtype)
            scale = 1.0
            loudness = _exponent(value, by_head=query.shape[:-2] == value.shape[:-2]).exp2() / _VALUES
            value = times(value, 1 / loudness, dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        with autocast_off_where_on((query.device.type,)):
            made = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return made.float() if loudness is None else made * loudness


def _level(
    query: torch.Tensor, key: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys scaled to one size, head by head, with the softmax's scale in them. Where their product
    is beyond what half precision holds of each, it is made smaller: such a softmax picks one key, and float32 knows it
    no better."""
    by_head = query.shape[:-2] == key.shape[:-2]
    queries, keys = _exponent(query, by_head=by_head), _exponent(key, by_head=by_head)
    both = (queries + keys).clamp(max=2 * _SOFTMAX_ROOM)
    half = (both / 2).floor()
    return times(query, (half - queries).exp2() * scale, dtype), times(key, (both - half - keys).exp2(), dtype)


class _Limits:
    """How large the values of a row may be that is multiplied by a weight. A parameter is read once, and again where it
    has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[weakref.ref[torch.Tensor], int, _Limit]] = {}

    def of(
        self, weight: torch.Tensor, dtype: torch.dtype, *, transposed: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return the weight in `dtype`, what its products have to be multiplied by (None: 1), and what rows may reach;
        the last two are float32 []."""
        version = 0 if weight.is_inference() else weight._version  # ComfyUI loads in inference mode, which counts none
        found = self._known.get((id(weight), transposed))
        if found and found[0]() is weight and found[1] == version:
            made = found[2]
        else:
            made = _limit(weight, dtype, transposed=transposed)
            if isinstance(weight, torch.nn.Parameter):
                self._known[id(weight), transposed] = weakref.ref(weight), version, made
        half = weight if made.quieter is None else times(weight, made.quieter, dtype)
        return half, made.loudness, made.limit


class _Limit(NamedTuple):
    """What rows may reach that are multiplied by a weight, and what the weight is divided by to be cast. All are
    float32 []; loudness, and quieter, its reciprocal, are None for 1."""

    limit: torch.Tensor
    loudness: torch.Tensor | None = None
    quieter: torch.Tensor | None = None


def _limit(weight: torch.Tensor, dtype: torch.dtype, *, transposed: bool) -> _Limit:
    largest = reach(weight.transpose(0, 1) if transposed else weight)
    if weight.dtype is dtype:
        return _Limit(limit_of(largest))
    loudness = (largest.clamp(min=LEAST).log2().floor() + 1).exp2() / _NORMAL
    return _Limit(limit_of(largest / loudness), loudness, 1 / loudness)


def _is_single(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _exponent(values: torch.Tensor, *, by_head: bool) -> torch.Tensor:
    """Return log2 of a power of two that no |x| of a head reaches, or of the whole tensor where heads are not told
    apart. float32 [..., 1, 1]."""
    dims = (-2, -1) if by_head else tuple(range(values.ndim))
    return largest_of(values, dims).clamp(min=LEAST).log2().floor() + 1


_TRANSPOSED = frozenset({F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d})
_LAYERS = frozenset({F.linear, F.conv1d, F.conv2d, F.conv3d}) | _TRANSPOSED
