"""The fold: scale a transformer's residual stream into fp16's range without changing its result.

Where the stream feeds only layer norms, scaling everything that writes to it by 2^-k, and the eps of every norm that
reads it by 2^-2k, cancels out: a power of two changes no mantissa, so the float32 result is the same to the bit. It
cannot help overflow elsewhere, inside a feed-forward or in attention; that is the guard's.

No weight changes. The fold is a shell of the denoiser in which the writers scale their input and bias: scaling weights
instead would make many of them subnormal in fp16.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch.nn import functional as F

from .dtypes import FP16_MAX
from .shells import Make, replaced
from .streams import Stream

HEADROOM_BITS = 2  # other prompts and later steps may peak higher than what was measured


class CannotFold(TypeError):
    """A module on the stream is not of the kind that the fold can scale; the message names it."""


def fold(module: torch.nn.Module, stream: Stream, k: int) -> torch.nn.Module:
    """A shell of `module` whose stream is scaled by 2^-k. Weights are shared, and `module` is not touched.

    A writer may be a `Linear` inside an adapter (peft's LoRA): what is added to its output follows its input.

    Raises CannotFold where a writer is no `Linear`, or a norm no `LayerNorm`.
    """
    scale = 2.0**-k
    replacements: dict[str, Make] = {stream.embed: lambda embed: _ScaledOutput(embed, scale)}
    for name in stream.writer_names(module):
        _expect(module, name, torch.nn.Linear)
        replacements[name] = lambda writer: _scaled_writer(writer, scale)
    for name in stream.norm_names(module):
        _expect(module, name, torch.nn.LayerNorm)
        replacements[name] = lambda norm: _with_eps(norm, scale * scale)
    return replaced(module, replacements)


def bits_for(peak: float) -> int:
    """k for a measured peak: the least that brings it into fp16's range, and headroom. 0 where it fits as it is.

    Raises ValueError where the peak is not finite: it must be measured in fp32 or bf16.
    """
    if not math.isfinite(peak):
        raise ValueError(f"the stream peaks at {peak}: measure it in fp32, where it is finite")
    ratio = peak / FP16_MAX
    return max(0, math.ceil(math.log2(ratio)) + HEADROOM_BITS) if ratio else 0


def _scaled_writer(writer: torch.nn.Module, scale: float) -> torch.nn.Module:
    if isinstance(writer, torch.nn.Linear):
        return _ScaledLinear(writer, scale)
    with_bias = [
        name
        for name, layer in writer.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
    ]
    biases: dict[str, Make] = {name: lambda linear: _ScaledBias(linear, scale) for name in with_bias}
    return _ScaledInput(replaced(writer, biases) if biases else writer, scale)


class _ScaledLinear(torch.nn.Module):
    def __init__(self, linear: torch.nn.Module, scale: float):
        super().__init__()
        self.linear: Any = linear
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x.to(self.linear.weight.dtype) * self.scale).to(x.dtype)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.linear.bias
        return F.linear(x, self.linear.weight, None if bias is None else bias * self.scale)  # pyright: ignore


class _ScaledBias(_ScaledLinear):
    """For an input that is scaled already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x.to(self.linear.weight.dtype)).to(x.dtype)


class _ScaledInput(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, scale: float):
        super().__init__()
        self.module = module
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x * self.scale)


class _ScaledOutput(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, scale: float):
        super().__init__()
        self.module = module
        self.scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        if isinstance(output, tuple):  # the image's tokens and the text's
            return tuple(part * self.scale for part in output)
        return output * self.scale


def _with_eps(norm: torch.nn.Module, factor: float) -> torch.nn.Module:
    shell: Any = copy.copy(norm)
    shell.eps = shell.eps * factor
    return shell


def _expect(module: torch.nn.Module, name: str, kind: type[torch.nn.Module]) -> None:
    found = module.get_submodule(name)
    adapted = getattr(found, "base_layer", None)  # as peft names it
    if isinstance(adapted, kind) and not getattr(found, "lora_variant", None):  # of LoRA, DoRA is no mere sum
        return
    if not isinstance(found, kind):
        raise CannotFold(
            f"'{name}' is a {type(found).__name__}, and the fold needs a {kind.__name__} there. "
            "Use precision 'bf16' or 'fp32' for this model."
        )
