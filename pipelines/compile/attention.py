"""The attention kernel of a run: named, or measured on this machine at the run's shapes, once, and remembered.

What was measured is kept beside the compiled code, in a file for each machine, so that later processes make the same
choice: two kernels round differently, and a choice by time that is made again could come out otherwise.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, ConfigDict, Field
from torch.utils import _pytree as pytree

from ...precision.attention import (
    BUDGET,
    KERNELS,
    MARGIN,
    TOLERANCE,
    Call,
    Choice,
    Timing,
    attention_calls,
    measure,
    offered,
)
from ...precision.dtypes import DTYPES
from ...precision.machine import driver, platform_of, version_of
from ...trust.foreign import Foreign
from .. import measured
from ..models.lora import skeleton
from .backends import MEASURED, CompileOptions, uses_torch_kernels

if TYPE_CHECKING:
    from ...precision.arch import Architecture
    from ..run.handle import PipelineHandle
    from ..run.stage import ComponentStage

logger = logging.getLogger(__name__)

_READ = ConfigDict(strict=False, allow_inf_nan=False)  # from an object, where strict would take an instance alone
_CHOICES = 256  # that are remembered of a machine; the others are measured anew
_Text = Annotated[str, Field(max_length=300)]
_Positive = Annotated[float, Field(ge=0, le=1e30)]


def _known_name(name: str) -> str:
    if name not in ("", *KERNELS):
        raise ValueError("the name of no kernel")
    return name


def with_attention(stage: ComponentStage, backend: str, inputs: Mapping[str, Any]) -> tuple[CompileOptions, str]:
    """Return the compile options of a denoiser's stage with a kernel in place of 'measured', and what to say about it.

    inputs: of one call of the denoiser, by keyword.

    Over several GPUs, the first rank chooses for all.
    """
    how = stage.handle.compile_options
    if how.attention != MEASURED:
        return how, ""
    if not uses_torch_kernels(backend):
        return replace(how, attention=""), f"attention: not measured, {backend} has its own"
    kernel, said = stage.handle.ranks.broadcast_from_rank0(lambda: _chosen(stage, inputs))
    return replace(how, attention=kernel), said


def _chosen(stage: ComponentStage, inputs: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kernel, "" for PyTorch's own choice, and what to say about it."""
    sizes = tuple(t.shape for t in pytree.tree_leaves(dict(inputs)) if isinstance(t, torch.Tensor))
    dtype, known = stage.plan.dtype, stage.handle.store.attention
    try:
        if (dtype, sizes) not in known:
            known[dtype, sizes] = _recalled(stage.handle, calls_of(stage, inputs))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # no memory; a network that reads values
        logger.warning("attention kernels could not be measured", exc_info=True)
        return "", f"attention: PyTorch's own choice, since nothing could be measured ({type(error).__name__})"
    return known[dtype, sizes].kernel, str(known[dtype, sizes])


def calls_of(stage: ComponentStage, inputs: Mapping[str, Any]) -> Mapping[Call, int]:
    """Return the calls of attention in one call of the denoiser, as this process makes them: of several ranks, each
    attends with a share of the heads. They are those of a denoiser without weights, which computes nothing."""
    denoiser, dtype = skeleton(stage.handle.store.model), stage.plan.dtype
    half = stage.handle.family.denoiser_inputs

    def without_numbers(name: str, value: Any) -> Any:
        cast = DTYPES[dtype] if name in half else None
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta", cast), value)

    with torch.inference_mode():
        given = {name: without_numbers(name, value) for name, value in inputs.items()}
        torch.nn.Module.to(denoiser, torch.device("meta"), DTYPES[dtype])
        denoiser = stage.adapt(denoiser)
        return attention_calls(lambda: denoiser(**given))


@dataclass
class _Timing:
    """A kernel's, as JSON has it: null where an error is not finite."""

    __pydantic_config__: ClassVar[ConfigDict] = _READ

    seconds: _Positive
    error: _Positive | None
    share: _Positive | None


@dataclass
class _Choice:
    __pydantic_config__: ClassVar[ConfigDict] = _READ

    kernel: Annotated[str, AfterValidator(_known_name)]
    timings: Annotated[dict[_Text, _Timing], Field(max_length=20)]
    left_out: Annotated[dict[_Text, _Text], Field(max_length=20)]


class _File(Foreign):
    """What was chosen on one machine."""

    machine: dict[_Text, Annotated[str, Field(max_length=1000)]]
    choices: Annotated[dict[_Text, _Choice], Field(max_length=_CHOICES)]


def _recalled(handle: PipelineHandle, calls: Mapping[Call, int]) -> Choice:
    """Return what this machine chose for these calls. At the first time it is measured, and kept; where another process
    has done so meanwhile, its choice counts."""
    device = handle.store.placement.device
    machine, key = machine_facts(device, handle.architecture), _key(calls)
    file = measured.kept_in(handle.measured, f"{_name(machine)}.attention.json")
    if key in (kept := _read(file, machine)):
        return _choice(kept[key])
    choice = measure(calls, device)
    kept = _read(file, machine)
    if key in kept:
        return _choice(kept[key])
    kept = dict([*kept.items(), (key, _as_json(choice))][-_CHOICES:])
    measured.write(file, {"machine": machine, "choices": {name: asdict(each) for name, each in kept.items()}})
    return choice


def machine_facts(device: torch.device, architecture: Architecture) -> dict[str, str]:
    """Return all that a choice hangs on but the calls: card, driver, versions, kernels, and our own rules."""
    facts = {name: str(value) for name, value in asdict(platform_of(device, architecture.name)).items()}
    facts["cudnn"] = str(torch.backends.cudnn.version()) if device.type == "cuda" else ""
    facts["driver"] = "" if device.type == "cpu" else driver()
    facts["sageattention"] = version_of("sageattention") or ""
    facts["kernels"] = ", ".join(kernel.name for kernel in offered(device))
    facts["rules"] = f"{TOLERANCE:g} times the least error, {BUDGET:g} of the norm, {MARGIN:g} times as fast"
    return facts


def _name(machine: Mapping[str, str]) -> str:
    return f"{machine['architecture']}-{_hash(machine)}"


def _key(calls: Mapping[Call, int]) -> str:
    """Return what tells calls apart, and shows those that take most: heads and channels, lengths, dtype, mask, scale,
    and how often each comes."""
    facts = sorted(f"{count} × {call}" for call, count in calls.items())
    longest = max(calls, key=lambda call: (math.prod(call.query) * call.key[-2], str(call)), default=None)
    shown = f"{'x'.join(map(str, longest.query))} by {longest.key[-2]} {longest.dtype}, " if longest else ""
    return f"{shown}{len(calls)} kinds of calls, {_hash(facts)}"


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _read(file: Path | None, machine: Mapping[str, str]) -> dict[str, _Choice]:
    found = measured.read(file, _File, limit=2**20)
    if found and found.machine != machine:
        measured.left_alone(file, "it is of another machine, or of other versions")
        return {}
    return dict(found.choices) if found else {}


def _choice(kept: _Choice) -> Choice:
    def finite_or_not(error: float | None) -> float:
        return math.inf if error is None else error

    timings = {
        name: Timing(each.seconds, finite_or_not(each.error), finite_or_not(each.share))
        for name, each in kept.timings.items()
    }
    return Choice(kept.kernel, timings, kept.left_out)


def _as_json(choice: Choice) -> _Choice:
    def or_none(error: float) -> float | None:
        return error if math.isfinite(error) else None

    timings = {
        name: _Timing(each.seconds, or_none(each.error), or_none(each.share)) for name, each in choice.timings.items()
    }
    return _Choice(choice.kernel, timings, dict(choice.left_out))
