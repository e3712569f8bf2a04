"""What would run on a card of so many bytes, and what it would take: the choice that a run makes, on modules without
values. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from ..families.layouts import Config
from ..families.table import VARIANTS
from ..models.on_disk import StoredModel
from ..run.decode import Portions, ways_to_decode
from ..run.denoiser import ways_to_denoise
from ..run.encode import ways_to_encode
from ..run.handle import PipelineHandle
from ..weights.components import ComponentStore
from ..weights.ladder import Way, first_that_fits
from ..weights.parts import Offload
from ..weights.placement import PlainPlacement
from .paper_result import OTHERS, RunOnPaper, Size, StageOnPaper
from .published import PUBLISHED


@dataclass(frozen=True)
class _Described(StoredModel):
    """A published model, of which no file is here."""

    configs: Mapping[str, Config]

    @classmethod
    def of(cls, variant: str) -> _Described:
        family, configs, options = PUBLISHED[variant]
        denoiser, vae = (family.components[name].on_meta(configs[name]) for name in (family.denoiser, "vae"))
        return cls(
            path=Path(variant),
            family=family,
            variant=VARIANTS[variant],
            weights={},
            denoiser_config=_config(denoiser),
            vae_config=_config(vae),
            options=options,
            notes=(),
            configs=configs,
        )

    def bare(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        return self.family.components[name].on_meta(self.configs[name], dtype)

    def component(self, name: str, dtype: torch.dtype) -> NoReturn:
        del dtype
        self.unweighted(name)

    def stored(self, name: str, parameter: Sequence[str]) -> NoReturn:
        del parameter
        self.unweighted(name)

    def unweighted(self, name: str) -> NoReturn:
        raise FileNotFoundError(f"{self.name} is described, not here: it has no {name}")


def _config(module: Any) -> Config:
    return dict(module.config)


class _Card(PlainPlacement):
    """A card to which nothing is moved."""

    def __init__(self) -> None:
        super().__init__(META)

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None: ...

    def to_host(self, name: str, module: torch.nn.Module) -> None: ...


class _Store(ComponentStore):
    """Components without values."""

    def _load(self, name: str, dtype: str) -> torch.nn.Module:
        return self.model.bare(name, DTYPES[dtype]).eval().requires_grad_(False)

    def _checked(self, name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        del name, module, dtype
        return []


def runs_on_paper(
    model: StoredModel | None,
    architecture: Architecture,
    memories: Sequence[int],
    size: Size | None = None,
    precision: Precision = Precision.AUTO,
    accumulation: Accumulation = Accumulation.AUTO,
) -> Iterator[RunOnPaper]:
    """Yield how a model's stages would run with offload 'auto'; where there is none, those of all published variants
    that can make that size.

    memories: of cards, in bytes: each model on each. size: width, height and frames; None: each model's own.
    A model of which the architecture cannot compute the precision is left out.
    Raises BadSize where the model cannot make that size.
    """
    models = [model] if model else (each for each in map(_Described.of, PUBLISHED) if _makes(each, size))
    for each in models:
        handle = PipelineHandle(
            store=_Store(each, _Card()),
            architecture=architecture,
            precision=precision,
            backend=BackendChoice(EAGER, "", automatic=True),
            offload=Offload.AUTO,
            policy=GuardPolicy(),
            accumulation=accumulation,
        )
        made = _check(each, size)
        try:
            stages = [(name, dtype, tee(ways, len(memories))) for name, dtype, ways in _stages(handle, made)]
        except PlanImpossible:  # which its plan says
            continue
        for number, memory in enumerate(memories):
            has = max(memory - OTHERS, 0)
            found = tuple(_stage(name, dtype, ways[number], has) for name, dtype, ways in stages)
            yield RunOnPaper(each.variant.name, made, memory, has, found)


def _makes(model: StoredModel, size: Size | None) -> bool:
    try:
        _check(model, size)
    except BadSize:
        return False
    return True


def _check(model: StoredModel, size: Size | None) -> Size:
    """Return the size to be made, the model's own where it is None. Raises BadSize."""
    family, pixels = model.family, model.family.layout.spatial(model.vae_config)
    size = size or family.usual_size(model.denoiser_config, pixels)
    if not family.layout.counts_frames and size[2] != 1:
        raise BadSize("{} makes images, not {} frames.", model.variant.name, size[2])
    family.sizes.check(width=size[0], height=size[1], frames=size[2])
    if bound := family.bound(model.denoiser_config, pixels, *size):
        raise BadSize("{} {}", model.variant.name, bound)
    return size


def _stages(handle: PipelineHandle, size: Size) -> Iterator[tuple[str, str, Iterator[Way]]]:
    family, model = handle.family, handle.store.model
    if family.prompt:
        stage = handle.stage(Component.TEXT_ENCODER)
        tokens = torch.zeros(1, family.prompt.tokens(model.denoiser_config), dtype=torch.long, device=META)
        inputs = {"input_ids": tokens} | ({"attention_mask": tokens.clone()} if family.prompt.masked else {})
        yield "text encoder", stage.plan.dtype, ways_to_encode(stage, inputs)
    shape = family.layout.latents_shape(model.vae_config, *size)
    inputs = family.step_inputs(model.denoiser_config, shape, model.options)
    for stage in handle.denoising():
        name = "denoiser" if len(family.denoisers) == 1 else stage.name
        yield name, stage.plan.dtype, ways_to_denoise(stage, inputs)
    stage = handle.stage(Component.VAE_DECODE)
    latents = torch.empty(shape, device=META)
    yield "decode", stage.plan.dtype, ways_to_decode(stage, latents, Portions(0, False, False))


def _stage(name: str, dtype: str, ways: Iterator[Way], has: int) -> StageOnPaper:
    way, fastest, fits = first_that_fits(ways, has)
    return StageOnPaper(name, dtype, way.said, way.weights, way.beside, fits, fastest.takes)
