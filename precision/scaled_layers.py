"""Scaled layers: they multiply in half precision and have float32's range.

fp16 ends at 65504, and a product of fp16 tensors may not fit although both do. A scaled layer scales each row of its
input (a token; for a convolution, a sample) by a power of two of its own, such that no sum of products leaves the range
whatever the signs, multiplies in fp16, and scales the result back in float32. Powers of two change no mantissa, so it
loses only what any fp16 product loses. Nothing is measured beforehand, no weight changes, and the host waits for
nothing.

Where the layers that start a residual stream and all that write to it are scaled, the sums between them are float32 by
promotion. All other layers cast what they are given to the dtype of their weights, and norms compute in float32 and
hand on half precision: only the stream is fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ..trust.message import Told
from .shallow_copy import KeptInFp32, Make, copy_with_base, replace_submodules

ROOM = 3e4  # of fp16's 65504: the largest product of a scaled row, so that rounding on the way does not pass the end
LARGEST = 2.0**14  # of a scaled row's values, so that small ones beside the largest keep digits
LEAST = 2.0**-100  # what a row's largest value counts for at least: float32 does not hold what would scale up a smaller
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
LAYERS = (torch.nn.Linear, *CONVOLUTIONS)
NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)


class CannotProtect(Told, TypeError):
    """A layer is not of a kind that can be scaled; the message names it."""


def with_fp32_residual_stream(
    module: torch.nn.Module,
    names: Iterable[str],
    dtype: torch.dtype,
    *,
    readers: Iterable[str] = (),
    device: torch.device | None = None,
) -> torch.nn.Module:
    """Return a shell of `module` whose residual stream is float32, while all else stays in half precision. Weights are
    shared, and `module` is not touched.

    names: the names of all layers that start the stream, and of all that write to it.
    dtype: the weights' dtype, which is half precision.
    readers: the names of modules that take their dtype from what they are given, and are to be given half precision.
    device: where the shell computes, if its weights are elsewhere until they are needed.

    Raises CannotProtect where a named layer is neither linear nor a convolution.
    """
    scaled: dict[str, Make] = {name: partial(_scaled_layer, name=name, device=device) for name in names}
    inside = tuple(f"{name}." for name in [*scaled, *_adapted_in_fp32(module)])  # adapters' own layers
    rest: dict[str, Make] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, (*LAYERS, *NORMS)) and not name.startswith(inside) and not _in_fp32(layer):
            kind = InHalf if isinstance(layer, LAYERS) else NormToHalf
            rest[name] = lambda layer, kind=kind: copy_with_base(layer, kind, half_dtype=dtype)
    around = {name: lambda reader: copy_with_base(reader, Reader, half_dtype=dtype) for name in readers}
    return replace_submodules(replace_submodules(module, rest | scaled), around)


def _in_fp32(layer: torch.nn.Module) -> bool:
    """Return whether the network's class keeps a layer in float32 beside half precision, as Wan keeps those that embed
    the timestep. The network itself then casts what it gives to the layer."""
    kept = isinstance(layer, LAYERS) and not isinstance(layer, KeptInFp32)
    return kept and layer.weight.dtype is torch.float32


def _adapted_in_fp32(module: torch.nn.Module) -> list[str]:
    """Return the names of layers with a LoRA around them that are kept in fp32. The LoRA is kept in it, too."""
    named = module.named_modules(remove_duplicate=False)
    return [name for name, layer in named if isinstance(getattr(layer, "base_layer", None), KeptInFp32)]


def _scaled_layer(layer: Any, name: str, device: torch.device | None) -> torch.nn.Module:
    """Return a scaled shell of a linear layer or a convolution, or of peft's LoRA around one: it takes half precision
    or float32, and gives float32."""
    base = getattr(layer, "base_layer", layer)  # as peft names it
    fits = isinstance(base, LAYERS)
    if not fits or getattr(layer, "lora_variant", None):  # of LoRA, DoRA is no mere sum
        raise CannotProtect(
            "'{}' is a {}, and only a Linear or a convolution can be protected against overflow. "
            "Use precision 'bf16' or 'fp32' for this model.",
            name,
            type(layer).__name__ + (" with DoRA" if fits else ""),
        )
    bias = _bias_with_adapters(layer)
    state = {
        "product_dtype": base.weight.dtype,
        "product_bias": base.bias if bias is None else bias.to(device=device),
        "product_limit": _limit(layer).to(device=device),
        "product_spatial": base.weight.ndim - 2,
    }
    biased = [part for part, each in layer.named_modules() if isinstance(each, LAYERS) and each.bias is not None]
    return copy_with_base(replace_submodules(layer, dict.fromkeys(biased, _without_bias)), ScaledLayer, **state)


def _without_bias(layer: torch.nn.Module) -> torch.nn.Module:
    bare = copy.copy(layer)
    bare.__dict__["_parameters"] = {**layer._parameters, "bias": None}
    return bare


def _bias_with_adapters(layer: Any) -> torch.Tensor | None:
    """Return the bias that a layer adds to its product, with its adapters' biases in it, in float32; None where those
    have none."""
    base = getattr(layer, "base_layer", layer)
    device = base.weight.device
    biases = [
        layer.scaling[name] * layer.lora_B[name].bias.detach().to(device, torch.float32)
        for name in _adapters(layer)
        if layer.lora_B[name].bias is not None
    ]
    if not biases:
        return None
    if base.bias is not None:
        biases.append(base.bias.detach().to(device, torch.float32))
    return torch.stack(biases).sum(0)


def _adapters(layer: Any) -> list[str]:
    """Return the names of peft's adapters that are in use in a layer."""
    return [name for name in getattr(layer, "active_adapters", ()) if name in layer.lora_A]


class ScaledLayer(torch.nn.Module):
    """A base before the class of a scaled layer: it multiplies scaled rows, and scales back in float32."""

    product_dtype: torch.dtype  # in which it multiplies
    product_bias: torch.Tensor | None
    product_limit: torch.Tensor  # what the values of a scaled row may reach; float32 [], a power of two
    product_spatial: int  # dimensions behind the channels

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]

        def product(scaled: torch.Tensor) -> torch.Tensor:
            return forward(scaled, *args, **kwargs)

        return scaled_product(
            product, x, self.product_dtype, self.product_limit, self.product_spatial, self.product_bias
        )


class InHalf(torch.nn.Module):
    """A base before the class of a layer that may be given float32, and computes in half precision."""

    half_dtype: torch.dtype

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x.to(self.half_dtype), *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class Reader(torch.nn.Module):
    """A base before the class of a module that may be given float32, by position or by name, and passes on half."""

    half_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        half = [self._half(each) for each in args]
        return super().forward(*half, **{name: self._half(each) for name, each in kwargs.items()})  # pyright: ignore

    def _half(self, given: Any) -> Any:
        is_fp32 = isinstance(given, torch.Tensor) and given.dtype is torch.float32
        return given.to(self.half_dtype) if is_fp32 else given


class NormToHalf(torch.nn.Module):
    """A base before the class of a norm that may be given float32: it computes in that, and puts out half precision."""

    half_dtype: torch.dtype

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype is not torch.float32:
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        given = {name: self._parameters.get(name) for name in ("weight", "bias")}  # one kept in fp32 has another, too
        weights = {name: None if each is None else each.float() for name, each in given.items()}
        return _normed(self, x, **weights).to(self.half_dtype)


def _normed(
    norm: Any, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if isinstance(norm, torch.nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, weight, bias, norm.eps)
    if isinstance(norm, torch.nn.RMSNorm):
        return F.rms_norm(x, list(norm.normalized_shape), weight, norm.eps)
    return F.layer_norm(x, list(norm.normalized_shape), weight, bias, norm.eps)


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


def times(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x · factor in `dtype`, computed in float32: in one pass, but for the CPU, where that takes 20 times as
    long."""
    if x.dtype is factor.dtype is dtype:
        return x * factor
    if x.device.type == "cpu":
        return (x.float() * factor).to(dtype)
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def _limit(layer: Any) -> torch.Tensor:
    """Return what the values of a scaled row may reach, so that no product of the layer leaves fp16's range.
    float32 []."""
    base = getattr(layer, "base_layer", layer)
    largest = reach(base.weight)
    for name in _adapters(layer):
        inner, outer = reach(layer.lora_A[name].weight), reach(layer.lora_B[name].weight)
        largest = torch.maximum(largest + abs(layer.scaling[name]) * inner * outer, inner)
    return limit_of(largest)


def limit_of(largest: torch.Tensor) -> torch.Tensor:
    """Return what the values of a scaled row may reach, so that no product leaves fp16's range. float32 [].

    largest: what `reach` says of the weights.
    """
    return (ROOM / largest.clamp(min=ROOM / LARGEST)).log2().floor().exp2()


def reach(weight: torch.Tensor) -> torch.Tensor:
    """Return the most that an output may be where inputs are at most 1: the largest sum of |w|. float32 []."""
    largest = reaches(weight)
    return largest.amax() if len(largest) else largest.new_zeros(())


def reaches(weight: torch.Tensor) -> torch.Tensor:
    """Return the same for each output. float32 [outputs]."""
    return torch.linalg.vector_norm(weight.detach().flatten(1), 1, 1, dtype=torch.float32)


def _scale(largest: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return the power of two that rows which reach `largest` are divided by to stay below `limit`."""
    above = largest.clamp(min=LEAST).log2().floor() + 1.0
    return above.exp2() / limit
