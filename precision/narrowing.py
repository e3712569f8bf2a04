"""What fp16 made of weights that are stored in fp32 or bf16: those beyond its range are read again and kept in fp32,
those too small for it are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..trust.message import Message
from .shallow_copy import keep_in_fp32

Stored = Callable[[Sequence[str]], torch.Tensor]  # a parameter's names → its values as the checkpoint holds them

LEAST_NORMAL: float = torch.finfo(torch.float16).smallest_normal  # 2^-14; below, fp16 loses digits, and below 2^-25 all
# The share of a component's weights that counts. Of weights that are drawn normally with a deviation of 0.02, as those
# of transformers are, 0.24 % are below 2^-14, and with 0.005 just 1 %; what fp16 takes from so few is lost in rounding.
TRACE = 0.01
_SAMPLE = 2**12  # values of a tensor that are counted; all of them would take longer on a CPU than casting them did


def mend_narrowed(module: torch.nn.Module, stored: Stored) -> list[str]:
    """Repair what the cast to fp16 did to a component that was just loaded. Returns a line for each thing found.

    - Layers with weights beyond fp16's range get them back in fp32, and compute in it.
    - Weights that fp16 made 0, or took digits from as they are subnormal there, are counted where they exceed 1 %.

    A tensor whose stored values are not finite stays as it is: that is damage, which the guard names.

    stored: reads a parameter's values from the checkpoint.
    """
    named = _named(module)
    return [*_bring_back(module, named, stored), *_count_small(named, stored)]


@dataclass(frozen=True)
class _Weight:
    names: tuple[str, ...]  # several where it is tied
    parameter: torch.nn.Parameter


def _named(module: torch.nn.Module) -> list[_Weight]:
    """Return a module's fp16 weights, each once, with all of its names."""
    weights: dict[int, _Weight] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.dtype is torch.float16 and parameter.numel():
            names = weights[id(parameter)].names if id(parameter) in weights else ()
            weights[id(parameter)] = _Weight((*names, name), parameter)
    return list(weights.values())


def _bring_back(module: torch.nn.Module, named: Sequence[_Weight], stored: Stored) -> Iterator[str]:
    if not named:
        return
    largest = torch.stack([torch.stack(torch.aminmax(weight.parameter)).abs().amax() for weight in named])
    back: list[str] = []
    peak = 0.0
    for weight, finite in zip(named, torch.isfinite(largest).tolist(), strict=True):
        values = None if finite else stored(weight.names).float()
        if values is None or not torch.isfinite(values).all():
            continue
        for name in weight.names:
            keep_in_fp32(module.get_submodule(name.rpartition(".")[0]), torch.float16)
        weight.parameter.data = values.to(weight.parameter.device, torch.float32)
        back.append(weight.names[0])
        peak = max(peak, values.abs().max().item())
    if back:
        which = (
            Message("'{}' holds", back[0])
            if len(back) == 1
            else Message("'{}' and {} more hold", back[0], len(back) - 1)
        )
        yield Message(
            "{} values of up to {:.3g}, which fp16 cannot hold: kept in fp32, and computed in it", which, peak
        )


def _count_small(named: Sequence[_Weight], stored: Stored) -> Iterator[str]:
    shares = [_small_share(weight.parameter) for weight in named]
    total = sum(weight.parameter.numel() for weight in named)
    suspects = [weight for weight, share in zip(named, shares, strict=True) if share > TRACE]
    if sum(share * weight.parameter.numel() for weight, share in zip(named, shares, strict=True)) <= TRACE * total:
        return
    lost: dict[str, int] = {}
    flushed = 0
    for weight in suspects:
        values = stored(weight.names).float()  # fp8 cannot be compared
        narrowed = values.half()
        small = (values.abs() < LEAST_NORMAL) & (values != narrowed)  # what is stored in few digits may lose none
        lost[weight.names[0]] = int(torch.count_nonzero(small))
        flushed += int(torch.count_nonzero(small & (narrowed == 0)))
    count = sum(lost.values())
    if count > TRACE * total:
        yield (
            Message(
                "{:.1%} of the weights are too small for fp16: {:,} become 0 and {:,} lose digits, most of them in "
                "'{}'; bf16 and fp32 hold them",
                count / total,
                flushed,
                count - flushed,
                max(lost, key=lambda name: lost[name]),
            )
        )


def _small_share(parameter: torch.Tensor) -> float:
    """Return the share of zeros and subnormal values, 0 to 1. Of many values, only evenly spread ones are counted."""
    values = parameter.detach().flatten()
    sample = values[:: -(-len(values) // _SAMPLE) | 1]  # odd: a row's length is not, and one column would be all of it
    return torch.count_nonzero(sample.abs() < LEAST_NORMAL).item() / len(sample)
