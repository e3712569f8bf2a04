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
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from .streams import Stream

HEADROOM_BITS = 2  # other prompts and later steps may peak higher than what was measured


class CannotFold(TypeError):
    """A module on the stream is not of the kind that the fold can scale; the message names it."""


def fold(module: torch.nn.Module, stream: Stream, k: int) -> torch.nn.Module:
    """A shell of `module` whose stream is scaled by 2^-k. Weights are shared, and `module` is not touched.

    Raises CannotFold where a writer is no `Linear`, or a norm no `LayerNorm`.
    """
    scale = 2.0**-k
    replacements: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
        stream.embed: lambda embed: _ScaledOutput(embed, scale)
    }
    for name in _names(module, stream, stream.writers):
        _expect(module, name, torch.nn.Linear)
        replacements[name] = lambda linear: _ScaledLinear(linear, scale)
    for name in _norm_names(module, stream):
        _expect(module, name, torch.nn.LayerNorm)
        replacements[name] = lambda norm: _with_eps(norm, scale * scale)
    return _replaced(module, replacements)


def stream_peak(module: torch.nn.Module, stream: Stream, call: Callable[[], Any]) -> float:
    """max |x| of the stream while `call` runs `module`, read at its norms' inputs. inf or NaN where it overflowed."""
    here = threading.get_ident()  # another thread may run the same module
    peaks: list[torch.Tensor] = []

    def watch(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == here:
            peaks.append(args[0].detach().abs().amax().float())

    handles = [module.get_submodule(name).register_forward_pre_hook(watch) for name in _norm_names(module, stream)]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(peaks).amax().item()


def bits_for(peak: float) -> int:
    """k for a measured peak: the least that brings it into fp16's range, and headroom. 0 where it fits as it is.

    Raises ValueError where the peak is not finite: it must be measured in fp32 or bf16.
    """
    if not math.isfinite(peak):
        raise ValueError(f"the stream peaks at {peak}: measure it in fp32, where it is finite")
    ratio = peak / torch.finfo(torch.float16).max
    return max(0, math.ceil(math.log2(ratio)) + HEADROOM_BITS) if ratio else 0


def _names(module: torch.nn.Module, stream: Stream, inner: tuple[str, ...]) -> list[str]:
    blocks = dict(module.get_submodule(stream.blocks).named_children())
    return [f"{stream.blocks}.{block}.{name}" for block in blocks for name in inner]


def _norm_names(module: torch.nn.Module, stream: Stream) -> list[str]:
    return [*_names(module, stream, stream.norms), *stream.last_norms]


class _ScaledLinear(torch.nn.Module):
    def __init__(self, linear: torch.nn.Module, scale: float):
        super().__init__()
        self.linear = linear
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.linear.bias
        return F.linear(x * self.scale, self.linear.weight, None if bias is None else bias * self.scale)  # pyright: ignore


class _ScaledOutput(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, scale: float):
        super().__init__()
        self.module = module
        self.scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.module(*args, **kwargs) * self.scale


def _with_eps(norm: torch.nn.Module, factor: float) -> torch.nn.Module:
    shell: Any = copy.copy(norm)
    shell.eps = shell.eps * factor
    return shell


def _replaced(
    module: torch.nn.Module, replacements: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module]]
) -> torch.nn.Module:
    """A shell of `module` in which the named submodules are replaced; only what leads to them is copied, shallowly."""
    if make := replacements.get(""):
        return make(module)
    below: dict[str, dict[str, Callable[[torch.nn.Module], torch.nn.Module]]] = {}
    for path, make in replacements.items():
        first, _, rest = path.partition(".")
        below.setdefault(first, {})[rest] = make
    shell = copy.copy(module)
    shell.__dict__["_modules"] = dict(module._modules)
    for name, inner in below.items():
        shell._modules[name] = _replaced(module.get_submodule(name), inner)
    return shell


def _expect(module: torch.nn.Module, name: str, kind: type[torch.nn.Module]) -> None:
    found = module.get_submodule(name)
    if not isinstance(found, kind):
        raise CannotFold(
            f"'{name}' is a {type(found).__name__}, and the fold needs a {kind.__name__} there. "
            "Use precision 'bf16' or 'fp32' for this model."
        )
