"""The attention kernel of a run: named, or measured on this machine at the run's shapes, once, and remembered.

A choice is kept beside the compiled code, so that later processes make the same one: two kernels round differently, and
a choice by time that is made again could come out otherwise. Nothing that is wrong with that file can fail a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch.utils import _pytree as pytree

from ...precision.attention import BUDGET, KERNELS, MARGIN, TOLERANCE, AttentionCall, attention_calls, measure, offered
from ...precision.dtypes import DTYPES
from ...precision.machine import driver, platform_of, version_of
from ...trust import foreign
from ...trust.atomic_files import limit_here, replacing
from ..models.lora import skeleton
from .backends import MEASURED, CompileOptions, uses_torch_kernels

if TYPE_CHECKING:
    from ...precision.arch import Architecture
    from ..run.handle import PipelineHandle
    from ..run.stage import ComponentStage

logger = logging.getLogger(__name__)

FILE = "attention.json"
_CHOICES = 256  # that are remembered; the others are measured anew
_Text = Annotated[str, Field(max_length=1000)]


def _known_name(name: str) -> str:
    if name not in ("", *KERNELS):
        raise ValueError("the name of no kernel")
    return name


class Chosen(foreign.Foreign):
    """A kernel, "" for PyTorch's own choice, and what the report says of it."""

    kernel: Annotated[str, AfterValidator(_known_name)]
    said: _Text


class _MeasurementFile(foreign.Foreign):
    choices: Annotated[dict[_Text, Chosen], Field(max_length=_CHOICES)]


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
    chosen = stage.handle.ranks.broadcast_from_rank0(lambda: _chosen(stage, inputs))
    return replace(how, attention=chosen.kernel), chosen.said


def _chosen(stage: ComponentStage, inputs: Mapping[str, Any]) -> Chosen:
    sizes = tuple(t.shape for t in pytree.tree_leaves(dict(inputs)) if isinstance(t, torch.Tensor))
    key, known = (stage.plan.dtype, sizes), stage.handle.store.attention
    try:
        if key not in known:
            known[key] = _recalled(stage.handle, calls_of(stage, inputs))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # no memory; a network that reads values
        logger.warning("attention kernels could not be measured", exc_info=True)
        why = f"since nothing could be measured ({type(error).__name__})"
        return Chosen(kernel="", said=f"attention: PyTorch's own choice, {why}")
    return known[key]


def calls_of(stage: ComponentStage, inputs: Mapping[str, Any]) -> Mapping[AttentionCall, int]:
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


def _recalled(handle: PipelineHandle, calls: Mapping[AttentionCall, int]) -> Chosen:
    """Return what this machine chose for these calls. At the first time it is measured, and kept; where another process
    has done so meanwhile, its choice counts."""
    device = handle.store.placement.device
    key = _key(calls, machine_facts(device, handle.architecture))
    file = handle.measured / FILE if handle.measured and limit_here(lambda _: None) else None
    if found := _read(file).get(key):
        return found
    choice = measure(calls, device)
    kept = _read(file)
    if key not in kept:
        kept = dict([*kept.items(), (key, Chosen(kernel=choice.kernel, said=str(choice)))][-_CHOICES:])
        _write(file, kept)
    return kept[key]


def machine_facts(device: torch.device, architecture: Architecture) -> dict[str, str]:
    """Return all that a choice hangs on but the calls: card, driver, versions, kernels, and our own rules."""
    facts = {name: str(value) for name, value in asdict(platform_of(device, architecture.name)).items()}
    facts["cudnn"] = str(torch.backends.cudnn.version()) if device.type == "cuda" else ""
    facts["driver"] = "" if device.type == "cpu" else driver()
    facts["sageattention"] = version_of("sageattention") or ""
    facts["kernels"] = ", ".join(kernel.name for kernel in offered(device))
    facts["rules"] = f"{TOLERANCE:g} times the least error, {BUDGET:g} of the norm, {MARGIN:g} times as fast"
    return facts


def _key(calls: Mapping[AttentionCall, int], machine: Mapping[str, str]) -> str:
    """Return what tells a machine and calls apart, and shows those that take most: heads and channels, lengths, dtype,
    mask, scale, and how often each comes."""
    longest = max(calls, key=lambda call: (math.prod(call.query) * call.key[-2], str(call)), default=None)
    shown = f"{'x'.join(map(str, longest.query))} by {longest.key[-2]} {longest.dtype}, " if longest else ""
    facts = json.dumps([machine, sorted(f"{count} × {call}" for call, count in calls.items())], sort_keys=True)
    return (
        f"{machine['architecture']}, {shown}{len(calls)} kinds of calls, {hashlib.sha256(facts.encode()).hexdigest()}"
    )


def _read(file: Path | None) -> dict[str, Chosen]:
    try:
        return (
            foreign.fitting(_MeasurementFile, foreign.read(file, limit=2**20)).choices
            if file and file.is_file()
            else {}
        )
    except (OSError, foreign.Unreadable) as error:
        logger.warning("'%s' is left alone, and measured anew: %s", file, error)
        return {}


def _write(file: Path | None, choices: Mapping[str, Chosen]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            stream.write(json.dumps({"choices": {key: each.model_dump() for key, each in choices.items()}}).encode())
    except OSError as error:
        logger.warning("what was measured could not be kept in '%s': %s", file, error)
