"""What a cast did to a component that was just loaded. What can be repaired is, and each finding is told.

T5's feed-forward ends in `wo`, which stays in fp32, as `_keep_in_fp32_modules` asks; a later `.to(fp16)` undoes that
without a word, and values beyond 65504 become infinite. And with `wo` in fp32 the stream is fp32 while the norms'
weights are fp16, which some fused norms (apex's FusedRMSNorm, which older transformers take where it is installed)
refuse: diffusers shows `expected scalar type Float but found Half`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..trust.message import Message, Told
from .dtypes import HALF_DTYPES, dtype_name
from .layer_peaks import has_children
from .process_state import NO_WARNINGS
from .shallow_copy import KeptInFp32, keep_in_fp32


class DamagedByCast(Told, ValueError):
    """Weights that belong in fp32 were cast to fp16 and overflowed, so their values are lost."""


def make_consistent(module: torch.nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> list[str]:
    """Repair the dtypes of a component that was just loaded in `dtype`. Returns a line for each thing found.

    - Parameters that the class keeps in fp32 (`_keep_in_fp32_modules`) and that are in half precision are put back.
    - Where some are kept in fp32, norms that refuse an input of another dtype than their weight compute in fp32.
    - Parameters in any other dtype than expected are named.

    device: where the component will compute, if it is elsewhere now. Fused norms are tried there.

    Raises DamagedByCast where a parameter that belongs in fp32 is not finite any more.
    """
    kept = _kept_in_fp32(module, dtype)
    softened = _soften_norms(module, device) if kept else ()
    return [*_put_back(module, kept), *softened, *_name_strangers(module, dtype, kept)]


def as_loaded(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast a module built from its config to the dtypes of one that is loaded in `dtype`: parts that its class keeps in
    fp32 are fp32, and buffers that no file holds stay as they are. Returns the module."""
    kept = _kept_in_fp32(module, dtype)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if _in(kept, name) else dtype)
    return module


def _put_back(module: torch.nn.Module, kept: frozenset[str]) -> Iterator[str]:
    cast = {name: p for name, p in module.named_parameters() if _in(kept, name) and p.dtype in HALF_DTYPES}
    for name, parameter in cast.items():
        broken = int((~torch.isfinite(parameter)).sum())
        if broken:
            raise DamagedByCast(
                "'{}' must stay in fp32 (as {} requires), but was cast to {}, where {} of its values are NaN or "
                "infinite. Load the weights again, in fp16 from the start and without a later .to(torch.float16).",
                name,
                type(module).__name__,
                dtype_name(parameter.dtype),
                broken,
            )
        parameter.data = parameter.data.float()
    if cast:
        yield Message(
            "{} restored to fp32, where {} keeps {}", _some(list(cast)), type(module).__name__, ", ".join(sorted(kept))
        )


def _soften_norms(module: torch.nn.Module, device: torch.device | None) -> Iterator[str]:
    tried: dict[Any, bool] = {}  # by class and dtype
    refusing: dict[str, torch.nn.Module] = {}
    for name, child in module.named_modules():
        if _is_half_norm(child):
            key = type(child), child.weight.dtype
            if key not in tried:
                tried[key] = _refuses_mixed_dtypes(child, device)
            if tried[key]:
                refusing[name] = child
    for norm in refusing.values():
        keep_in_fp32(norm, next(norm.parameters()).dtype)
    if refusing:
        kind = type(next(iter(refusing.values()))).__name__
        yield Message(
            "{} ({}) refuses inputs in another dtype than its weight's: now in fp32", _some(list(refusing)), kind
        )


def _name_strangers(module: torch.nn.Module, dtype: torch.dtype, kept: frozenset[str]) -> Iterator[str]:
    computing = [name for name, child in module.named_modules() if isinstance(child, KeptInFp32)]
    in_fp32 = tuple(Message("{}.", name) if name else "" for name in computing)
    strangers: dict[torch.dtype, list[str]] = {}
    for name, parameter in module.named_parameters():
        expected = torch.float32 if _in(kept, name) or name.startswith(in_fp32) else dtype
        if parameter.is_floating_point() and parameter.dtype != expected and parameter.numel():
            strangers.setdefault(parameter.dtype, []).append(name)
    for found, names in strangers.items():
        yield Message("{}: in {}, not in {} like the rest", _some(names), dtype_name(found), dtype_name(dtype))


def _kept_in_fp32(module: torch.nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Return the names of the parts that the class keeps in fp32. In bf16, transformers' classes keep only their
    "strict" parts; diffusers' classes keep all of them in fp16 and in bf16."""
    usual = getattr(module, "_keep_in_fp32_modules", None) or ()
    strict = getattr(module, "_keep_in_fp32_modules_strict", usual) or ()
    return frozenset({torch.float16: (*usual, *strict), torch.bfloat16: tuple(strict)}.get(dtype, ()))


def _in(kept: frozenset[str], parameter: str) -> bool:
    return not kept.isdisjoint(parameter.split("."))


def _is_half_norm(module: torch.nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None)
    if has_children(module) or not isinstance(weight, torch.nn.Parameter):
        return False
    return "norm" in type(module).__name__.lower() and weight.dtype in HALF_DTYPES and weight.ndim == 1


def _refuses_mixed_dtypes(module: Any, device: torch.device | None) -> bool:
    """Return whether a half-precision norm accepts its own dtype and raises at fp32. It is tried: its class name does
    not tell."""
    if device is not None and device != module.weight.device:
        module = copy.deepcopy(module).to_empty(device=device)  # without copying values, which do not matter
    weight = module.weight
    row = torch.ones(1, *weight.shape, device=weight.device)
    return _takes(module, row.to(weight.dtype)) and not _takes(module, row)


@torch.no_grad()
def _takes(module: torch.nn.Module, row: torch.Tensor) -> bool:
    try:
        with NO_WARNINGS.held():  # PyTorch warns of a norm that is slow with another dtype
            module(row)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _some(names: list[str]) -> str:
    return f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' and {len(names) - 1} more"


Stored = Callable[[Sequence[str]], torch.Tensor]  # a parameter's names → its values as the checkpoint holds them

LEAST_NORMAL: float = torch.finfo(torch.float16).smallest_normal  # 2^-14; below, fp16 loses digits, and below 2^-25 all
# The share of a component's weights that counts. Of weights that are drawn normally with a deviation of 0.02, as those
# of transformers are, 0.24 % are below 2^-14, and with 0.005 just 1 %; what fp16 takes from so few is lost in rounding.
TRACE = 0.01
_SAMPLE = 2**12  # values of a tensor that are counted; all of them would take longer on a CPU than casting them did


def mend_narrowed(module: torch.nn.Module, stored: Stored) -> list[str]:
    """Repair the damage of a cast to fp16 in a component that was just loaded. Returns a line for each finding.

    - Layers with weights beyond fp16's range get them back in fp32, and compute in it. So do layers with a weight of
      which fp16 keeps fewer digits than bf16.
    - Weights that underflow to 0 or to subnormal numbers in fp16 are reported if they are more than 1 %.

    A tensor whose stored values are not finite stays as it is: the file is damaged, which the guard reports.

    stored: reads a parameter's values from the checkpoint.
    """
    named = _named(module)
    shares = {weight: _small_share(weight) for weight in named}
    return [*_bring_back(module, named, shares, stored), *_count_small(named, shares, stored)]


_Weights = Mapping[torch.nn.Parameter, tuple[str, ...]]  # each once, with all of its names


def _named(module: torch.nn.Module) -> _Weights:
    """Return a module's fp16 weights."""
    weights: dict[torch.nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.dtype is torch.float16 and parameter.numel():
            weights[parameter] = (*weights.get(parameter, ()), name)
    return weights


_Shares = Mapping[torch.nn.Parameter, float]  # of values that are 0 or subnormal


def _bring_back(module: torch.nn.Module, named: _Weights, shares: _Shares, stored: Stored) -> Iterator[str]:
    if not named:
        return
    beyond: dict[str, float] = {}  # → its largest value
    faint: dict[str, float] = {}
    largest = torch.stack([torch.stack(torch.aminmax(weight)).abs().amax() for weight in named])
    for (weight, names), finite in zip(named.items(), torch.isfinite(largest).tolist(), strict=True):
        owner, own = names[0].rpartition(".")[::2]
        counts = own != "bias" or isinstance(module.get_submodule(owner), KeptInFp32)
        is_faint = finite and counts and shares[weight] > 0.5
        values = None if finite and not is_faint else stored(names).float()
        if values is None or not torch.isfinite(values).all() or (is_faint and not _loses_digits(values)):
            continue
        for name in names:
            keep_in_fp32(module.get_submodule(name.rpartition(".")[0]), torch.float16)
        weight.data = values.to(weight.device, torch.float32)
        (faint if is_faint else beyond)[names[0]] = values.abs().max().item()
    if beyond:
        yield Message(
            "{} values up to {:.3g}, beyond fp16: kept and computed in fp32", _which_hold(beyond), max(beyond.values())
        )
    if faint:
        yield Message(
            "{} values of at most {:.3g}, for which fp16 has few digits: kept and computed in fp32",
            _which_hold(faint),
            max(faint.values()),
        )


def _which_hold(names: Mapping[str, float]) -> str:
    first = next(iter(names))
    return Message("'{}' holds", first) if len(names) == 1 else Message("'{}' and {} more hold", first, len(names) - 1)


def _loses_digits(values: torch.Tensor) -> bool:
    """Return whether fp16 is farther off than bf16 may be, 2^-9, in most rows that are not 0."""
    rows = values.flatten(1) if values.ndim > 1 else values[None]
    size, off = rows.norm(dim=1), (rows - rows.half()).norm(dim=1)
    return (off > size * 2.0**-9).sum().item() > 0.5 * torch.count_nonzero(size).item()


def _count_small(named: _Weights, shares: _Shares, stored: Stored) -> Iterator[str]:
    total = sum(weight.numel() for weight in named)
    suspects = [weight for weight in named if weight.dtype is torch.float16 and shares[weight] > TRACE]
    if sum(shares[weight] * weight.numel() for weight in suspects) <= TRACE * total:
        return
    lost: dict[str, int] = {}
    flushed = 0
    for weight in suspects:
        values = stored(named[weight]).float()  # fp8 cannot be compared
        narrowed = values.half()
        small = (values.abs() < LEAST_NORMAL) & (values != narrowed)  # values of few digits may lose none
        lost[named[weight][0]] = int(torch.count_nonzero(small))
        flushed += int(torch.count_nonzero(small & (narrowed == 0)))
    count = sum(lost.values())
    if count > TRACE * total:
        yield Message(
            "{:.1%} of the weights are too small for fp16: {:,} become 0 and {:,} lose digits, most of them in '{}'; "
            "bf16 and fp32 hold them",
            count / total,
            flushed,
            count - flushed,
            max(lost, key=lambda name: lost[name]),
        )


def _small_share(parameter: torch.Tensor) -> float:
    """Return the share of zeros and subnormal values, 0 to 1. Of many values, only evenly spread ones are counted."""
    values = parameter.detach().flatten()
    sample = values[:: -(-len(values) // _SAMPLE) | 1]  # odd: a row's length is not, and one column would be all of it
    return torch.count_nonzero(sample.abs() < LEAST_NORMAL).item() / len(sample)
