"""The run feature of the step cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...precision.after_failure import HalfPrecisionForward
from ...precision.error_estimate import CachePolicy
from ...precision.layer_peaks import block_names
from ...precision.report import StepRecord
from ...precision.step_cache import DenoiserHistory, GuidanceWeights, StepCacheController, with_most_memory
from .feature import CallFeature, DenoiserSetup, Feature, RunContext

if TYPE_CHECKING:
    from ..families.spec import FamilySpec
    from ..parallel.split_calls import ParallelRun
    from .sample import SampleSettings
    from .stage import ComponentStage

UNCACHED = "no step cache"


class CachedRun(Feature):
    """Skips most of a denoiser on predictable steps. A run's denoisers share one controller."""

    def __init__(self, run: RunContext, settings: SampleSettings, policy: CachePolicy, parallel: ParallelRun | None):
        self._controller = StepCacheController(policy, settings.computed_steps)
        self._weights = guidance_weights(run.handle.family, settings)
        self._shares = (parallel.own_share, parallel.of_both_halves) if parallel else ()
        self._report = run.report
        self._caches: dict[str, DenoiserHistory] = {}  # by denoiser
        self.pending = self._controller.pending

    @contextmanager
    def around_run(self) -> Generator[None]:
        try:
            yield
        finally:
            self._report.account(self._controller.use)

    def saving(self, stage: ComponentStage, inputs: Mapping[str, Any]) -> str:
        del inputs
        return UNCACHED if _blocks(stage) else ""

    def reset(self, denoiser: str) -> None:
        if own := self._caches.get(denoiser):
            own.forget()  # also clears the other denoisers' history
            return
        for other in self._caches.values():
            other.history.clear()

    def of_calls(self, setup: DenoiserSetup) -> CallFeature | None:
        stage, known = setup.stage, self._caches.get(setup.stage.name)
        blocks = _blocks(stage)
        if not blocks:
            stage.report.note("no step is cached: the denoiser has no blocks to skip")
        if not blocks or UNCACHED in setup.savings:
            return None
        weights = self._weights[stage.handle.family.denoisers.index(stage.name)]
        self._caches[stage.name] = cache = known or DenoiserHistory(blocks, self._controller, weights, *self._shares)
        return CachedCalls(cache, setup)

    def on_meta(self, setup: DenoiserSetup) -> CallFeature | None:
        blocks = _blocks(setup.stage)
        calls = setup.stage.report.calls_per_step * len(setup.calls)
        return _FullCache(blocks, calls) if blocks and UNCACHED not in setup.savings else None

    def on_step_end(self, latents: torch.Tensor) -> None:
        self._controller.end_step(latents)
        self._report.cache = self._controller.use


class CachedCalls(CallFeature):
    def __init__(self, cache: DenoiserHistory, setup: DenoiserSetup):
        self._cache, self._report = cache, setup.stage.report

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        return replace(made, run=self._cache.attempt(made.run))

    def wrap_rerun(self, rerun: Callable[..., Any]) -> Callable[..., Any]:
        return self._cache.rerun(rerun)

    def wrap_guarded(self, call: Callable[..., Any], *, rerun: bool) -> Callable[..., Any]:
        return self._cache.guarded(call, rerun=rerun)

    def end_call(self, record: StepRecord) -> None:
        self._report.cached(self._cache.keep(accepted=record.outcome in ("finite", "rerun")))


class _FullCache(CallFeature):
    """A stand-in that keeps as much memory as the cache ever does, for the estimate."""

    def __init__(self, blocks: Sequence[str], calls: int):
        self._blocks, self._calls = blocks, calls

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        return replace(made, run=with_most_memory(made.run, self._blocks, self._calls))


def _blocks(stage: ComponentStage) -> tuple[str, ...]:
    """Return the names of the blocks that a step may skip; () if there is only one block."""
    found = block_names(stage.module, filter(None, [stage.handle.family.cached_blocks]))
    return found if len(found) > 1 else ()


def guidance_weights(family: FamilySpec, settings: SampleSettings) -> tuple[GuidanceWeights, ...]:
    """Return guidance's factors for a step's outputs, for each denoiser: of the halves of a batch (negative prompt
    first), or of two calls (positive prompt first)."""
    scale = settings.scale(family)
    if scale <= 1:
        return ((1.0,),) * len(family.denoisers)
    scales = [scale, settings.guidance_scale_2 or scale][: len(family.denoisers)]
    return tuple((1 - each, each) if family.guidance.calls == 1 else (each, 1 - each) for each in scales)
