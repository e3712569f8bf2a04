"""Scaled products: they multiply in half precision and have float32's range.

fp16 ends at 65504, and a product of fp16 tensors may not fit although both do. So each row of a layer's input (a token;
for a convolution, a sample) is scaled by a power of two of its own, such that no sum of products leaves the range
whatever the signs, multiplied in fp16, and the result is scaled back in float32. Powers of two change no mantissa, so
it loses only what any fp16 product loses. Nothing is measured beforehand, no weight changes, and the host waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ROOM = 3e4  # of fp16's 65504: the largest product of a scaled row, so that rounding on the way does not pass the end
LARGEST = 2.0**14  # of a scaled row's values, so that small ones beside the largest keep digits
LEAST = 2.0**-100  # what a row's largest value counts for at least: float32 does not hold what would scale up a smaller
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
LAYERS = (torch.nn.Linear, *CONVOLUTIONS)
NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)


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
