"""Estimates how each stage would run on a card of so many bytes: the choice that offload 'auto' makes, counted on
modules without values. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...precision.accumulation import Accumulation
from ...precision.activations import META
from ...precision.arch import Architecture
from ...precision.dtypes import DTYPES
from ...precision.guard import GuardPolicy
from ...precision.policy import Component, PlanImpossible, Precision
from ..compile.backends import EAGER, BackendChoice
from ..errors import BadSize
from ..families.table import VARIANTS
from ..models.on_disk import StoredModel
from ..run.decode import Portions, ways_to_decode
from ..run.denoiser import ways_to_run
from ..run.handle import PipelineHandle
from ..run.sample import SampleSettings, check_size
from ..weights.components import ComponentStore
from ..weights.offload import Offload
from ..weights.oom_fallback import ExecutionOption, first_that_fits
from ..weights.placement import PlainPlacement
from .probe import usual_size
from .published import PUBLISHED

RESERVED = 800_000_000  # bytes of a card that its driver, a desktop and CUDA's context take

Size = tuple[int, int, int]  # width, height, frames


@dataclass(frozen=True)
class StageEstimate:
    """One stage, as it would run. Sizes are in bytes."""

    stage: str
    dtype: str
    way: str  # "none", "group", "tiling", ...
    weights: int  # on the card at once
    beside: int
    fits: bool


@dataclass(frozen=True)
class RunEstimate:
    """One model's run on a card of `memory` bytes, of which `has` are for it."""

    variant: str
    size: Size
    memory: int
    has: int
    stages: tuple[StageEstimate, ...]


def estimate_runs(
    model: StoredModel | None,
    architecture: Architecture,
    memories: Sequence[int],
    size: Size | None = None,
    precision: Precision = Precision.AUTO,
    accumulation: Accumulation = Accumulation.AUTO,
) -> Iterator[RunEstimate]:
    """Yield an estimate for each card. model: None for all published variants that can make that size.

    memories: of cards, in bytes. size: None for each model's own. A model of which the architecture cannot
    compute the precision is left out. Raises BadSize where the model cannot make that size.
    """
    for each in [model] if model else map(_PublishedModel.of, PUBLISHED):
        handle = PipelineHandle(
            store=_MetaStore(each, _MetaPlacement(META)),
            architecture=architecture,
            precision=precision,
            backend=BackendChoice(EAGER, "", automatic=True),
            offload=Offload.AUTO,
            policy=GuardPolicy(),
            accumulation=accumulation,
        )
        width, height, frames = made = size or usual_size(handle, 0, 0, 0)
        try:
            check_size(handle, SampleSettings(width, height, steps=1, seed=0, frames=frames))
        except BadSize:
            if model:
                raise
            continue
        try:
            stages = [(name, dtype, tee(ways, len(memories))) for name, dtype, ways in _stages(handle, made)]
        except PlanImpossible:  # which its plan says
            continue
        for number, memory in enumerate(memories):
            has = max(memory - RESERVED, 0)
            found: list[StageEstimate] = []
            for name, dtype, ways in stages:
                way, _, fits = first_that_fits(ways[number], has)
                found.append(StageEstimate(name, dtype, way.said, way.weights, way.beside, fits))
            yield RunEstimate(each.variant.name, made, memory, has, tuple(found))


def _stages(handle: PipelineHandle, size: Size) -> Iterator[tuple[str, str, Iterator[ExecutionOption]]]:
    family, model = handle.family, handle.store.model
    if family.prompt:
        stage = handle.stage(Component.TEXT_ENCODER)
        tokens = torch.zeros(1, family.prompt.tokens(model.denoiser_config), dtype=torch.long, device=META)
        inputs = {"input_ids": tokens} | ({"attention_mask": tokens.clone()} if family.prompt.masked else {})
        yield "text encoder", stage.plan.dtype, ways_to_run(stage, inputs, features=())
    shape = family.layout.latents_shape(model.vae_config, *size)
    inputs = family.step_inputs(model.denoiser_config, shape, model.options)
    for stage in handle.denoising():
        name = "denoiser" if len(family.denoisers) == 1 else stage.name
        yield name, stage.plan.dtype, ways_to_run(stage, inputs)
    stage = handle.stage(Component.VAE_DECODE)
    latents = torch.empty(shape, device=META)
    yield "decode", stage.plan.dtype, ways_to_decode(stage, latents, Portions(0, False, False))


@dataclass(frozen=True)
class _PublishedModel(StoredModel):
    """A published model, of which no file is here."""

    @classmethod
    def of(cls, variant: str) -> _PublishedModel:
        family, configs, options = PUBLISHED[variant]
        built: list[Any] = [family.components[name].on_meta(configs[name]) for name in (family.denoiser, "vae")]
        denoiser, vae = (dict(module.config) for module in built)
        return cls(Path(variant), family, VARIANTS[variant], {}, configs, denoiser, vae, options, ())

    def unweighted(self, *_: Any, **__: Any) -> NoReturn:
        raise FileNotFoundError(f"{self.name} is described, not here")

    component = stored = unweighted


class _MetaPlacement(PlainPlacement):
    """A card to which nothing is moved."""

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None: ...

    def to_host(self, name: str, module: torch.nn.Module) -> None: ...


class _MetaStore(ComponentStore):
    """Components without values."""

    def _load(self, name: str, dtype: str) -> torch.nn.Module:
        return self.model.bare(name, DTYPES[dtype]).eval().requires_grad_(False)

    def _checked(self, *_: Any, **__: Any) -> list[str]:
        return []
