"""The features of a run: what it does beside calling its denoiser under the guard. Each can be left out.

`features_of` puts a run's features together. Those that need a folder of their own are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...precision.fallback import HalfPrecisionForward
from ...precision.overflow import Clips
from ...precision.overrides import MAX_FP16_ERROR, fp16_accumulation_in_words
from ...precision.report import RunReport
from ...precision.shallow_copy import with_forward
from ..compile.backends import EAGER, for_dtype
from .feature import CallFeature, DenoiserSetup, Feature, RunContext, joined, split_cfg_batch

if TYPE_CHECKING:
    from .stage import ComponentStage

APART = "CFG halves in turn"  # how `SplitBatch` takes less memory


def features_of(run: RunContext) -> list[Feature]:
    """Return the features of a run, the innermost first."""
    handle, family, plan = run.handle, run.handle.family, run.plan
    found: list[Feature] = []
    if plan.quantised:
        from ..weights.quantising import QuantisedRun

        found.append(QuantisedRun())
    if handle.backend.name != EAGER or run.compile_key or handle.compile_options.attention:
        from ..compile.feature import CompiledRun

        found.append(CompiledRun(run))
    if plan.fp16_sums:
        found.append(Fp16Accumulation())
    parallel = None
    if not handle.ranks.alone:
        from ..parallel.feature import ParallelRun

        parallel = ParallelRun(run)
    if run.settings and handle.step_cache and handle.step_cache.error and family.cached_blocks:
        from .step_cache import CachedRun

        found.append(CachedRun(run, run.settings, handle.step_cache, parallel))
    found.append(SplitBatch())
    if plan.dtype == "fp16" and not plan.quantised:
        found.append(ClippedValues())
    if parallel:
        found.append(parallel)
    if run.previews and run.settings:
        from .previews import PreviewedRun

        found.append(PreviewedRun(run.previews, handle, run.settings.frames))
    return found


class Fp16Accumulation(Feature):
    """Products that accumulate in fp16, where a step has shown that this is right, by a backend that can."""

    def of_calls(self, setup: DenoiserSetup) -> CallFeature | None:
        stage, handle = setup.stage, setup.stage.handle
        where = f"fp16 accumulation in the {stage.name}"
        backend = for_dtype(handle.backend, handle.architecture, stage.plan.dtype).name
        if backend not in (EAGER, "inductor"):
            stage.report.note(f"{where}: nothing, since {backend} multiplies in its own way", instead_of=where)
            return None
        return _Fp16Accumulation(stage.report, where)


class _Fp16Accumulation(CallFeature):
    def __init__(self, report: RunReport, where: str):
        self._report, self._where = report, where

    def build_options(self) -> dict[str, Any]:
        return {"fp16_sums": True}

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        error = made.overrides.fp16_error
        if error is not None:
            said = fp16_accumulation_in_words(error)
            self._report.note(f"{self._where}: {said}", instead_of=self._where)
        right = error is not None and error <= MAX_FP16_ERROR
        return replace(made, fp16_accumulation=right)


class ClippedValues(Feature):
    """Looks at what a network clips in fp16: it comes out finite, and wrong. T5 clamps at ±64504, CogView3-Plus its
    stream at ±65504."""

    def of_calls(self, setup: DenoiserSetup) -> CallFeature:
        return _ClippedValues(setup.stage.plan.dtype, together=not setup.stage.handle.ranks.alone)


class _ClippedValues(CallFeature):
    """together: several processes compute the network, and each has to say something."""

    def __init__(self, dtype: str, *, together: bool = False):
        self._clips, self._together, self._watches = Clips(dtype), together, True

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        self._watches = not made.all_layers_scaled
        return replace(made, run=self._clips.watched(made.run)) if self._watches else made

    def peak_inside(self) -> torch.Tensor | None:
        if not self._watches:  # the latest attempt, while all processes agree on that
            return None
        return self._clips.peak if self._together else self._clips.take()


class SplitBatch(Feature):
    """Computes both halves of a batch one after the other, where memory is short. Ranks make the same calls, whatever
    room each has."""

    def saving(self, stage: ComponentStage, inputs: Mapping[str, Any]) -> str:
        return APART if stage.handle.ranks.alone and len(split_cfg_batch(inputs)) > 1 else ""

    def split(self, inputs: Mapping[str, Any], savings: tuple[str, ...]) -> Sequence[Mapping[str, Any]]:
        return split_cfg_batch(inputs) if APART in savings else [inputs]

    def of_calls(self, setup: DenoiserSetup) -> CallFeature | None:
        return _HalfByHalf() if APART in setup.savings else None


class _HalfByHalf(CallFeature):
    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        return replace(made, run=_half_by_half(made.run), eager=_half_by_half(made.eager))

    def wrap_rerun(self, rerun: Callable[..., Any]) -> Callable[..., Any]:
        return _half_by_half(rerun)


def _half_by_half(call: Callable[..., Any]) -> Callable[..., Any]:
    def apart(**inputs: Any) -> Any:
        return joined([call(**part) for part in split_cfg_batch(inputs)])

    return with_forward(call, apart) if isinstance(call, torch.nn.Module) else apart
