"""The denoiser for a diffusers pipeline: guarded calls with the run's features, in the fastest execution option that
fits the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.after_failure import HalfPrecisionForward, build_half_precision_forward
from ...precision.guard import Scope, StageGuard
from ...precision.overrides import NOTHING, PrecisionOverrides
from ...precision.shallow_copy import reporting, with_forward
from ...trust.message import Message, joined
from ..compile.backends import EAGER
from ..families.spec import ENCODERS, PROMPT
from ..parallel.group import ALONE, ProcessGroup
from ..weights.activation_memory import estimate_activation_bytes
from ..weights.placement import ExecutionOption, OomFallback
from .feature import (
    CallFeature,
    ClippedValues,
    DenoiserSetup,
    Feature,
    Fp16Accumulation,
    RunContext,
    SplitBatch,
    options_of,
    wrapped,
)
from .handle import load_profile, update_cache
from .stage import ComponentStage

PROFILE_UNUSED = Message(
    "the given profile is not used: it needs the guard's scope 'learned', and a guarded 'fp16' or 'bf16'"
)


def features_of(run: RunContext) -> list[Feature]:
    """Return the features of a run, the innermost first. Features of other modules are imported only when needed."""
    handle, family, plan = run.handle, run.handle.family, run.plan
    found: list[Feature] = []
    if plan.quantised:
        from ..weights.quantising import QuantisedRun

        found.append(QuantisedRun())
    if handle.backend.name != EAGER or run.compile_key or handle.compile_options.attention:
        from ..compile.compiled_blocks import CompiledRun

        found.append(CompiledRun(run))
    if plan.fp16_sums:
        found.append(Fp16Accumulation())
    parallel = None
    if not handle.ranks.alone:
        from ..parallel.split_calls import ParallelRun

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


def guarded_denoiser(stage: ComponentStage, features: Sequence[Feature] | None = None) -> torch.nn.Module:
    """Return a shallow copy of the denoiser that runs by the stage's plan. Loads the original, which is not changed and
    shares its weights with the copy.

    features: of the run; None: the features of single calls.
    """
    if features is None:
        features = features_of(RunContext(stage.handle, stage.plan, stage.report))
    call: Callable[..., Any] = GuardedDenoiser(stage, features)
    for feature in features:
        call = feature.wrap_denoiser(stage, call)
    shell = with_forward(stage.module, call)
    return reporting(shell, dtype=torch.float32, device=stage.handle.store.placement.device)


def ways_to_run(
    stage: ComponentStage,
    inputs: Mapping[str, Any],
    features: Sequence[Feature],
    known: PrecisionOverrides = NOTHING,
    savings: tuple[str, ...] = (),
    take: Callable[[ComponentStage, tuple[str, ...]], object] = lambda *_: None,
    ranks: ProcessGroup = ALONE,
) -> Iterator[ExecutionOption]:
    """Yield the ways to make the calls of a denoiser or a text encoder in a run, the fastest first.

    inputs: a call's arguments. features: of the run. savings: those in use already. take: called with the stage and
    the features' memory savings. ranks: the processes that make the calls together. All use the largest estimate, so
    that they choose the same option.
    """
    more = [each for feature in features if (each := feature.saving(stage, inputs)) and each not in savings]
    for offload, kind in stage.ways():
        for chosen in product(*(("", each) for each in reversed(more))):
            saved = (*savings, *filter(None, chosen))
            beside = estimate_activation_bytes(DenoiserSetup(kind, inputs, saved), known, features)
            yield ExecutionOption(
                ", ".join((offload, *saved)),
                kind.weights_at_once(),
                ranks.all_reduce_max(beside),
                partial(take, kind, saved),
            )


class GuardedCalls:
    """Guarded calls of a denoiser or a text encoder in one run, with features, which also place the component."""

    def __init__(self, stage: ComponentStage, features: Sequence[Feature], ranks: ProcessGroup = ALONE):
        self._stage = stage
        self._features = features
        self._ranks = ranks  # that make them together
        self._signature = inspect.signature(stage.module.forward)
        self._known = NOTHING  # overrides of earlier runs
        self._guard: StageGuard | None = None
        self._standing = (0, False)  # number of failures and whether all is in fp32, from the guard before
        self._of_calls: list[CallFeature] = []
        self._savings: tuple[str, ...] = ()  # memory savings of features
        self._placed = False
        self._oom_fallback = OomFallback(stage, ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                inputs |= inputs.pop(name, {})
        return self._oom_fallback.run(partial(self._called, inputs), partial(self._ways, inputs))

    def _ways(self, inputs: Mapping[str, Any]) -> Iterator[ExecutionOption]:
        return ways_to_run(self._stage, inputs, self._features, self._known, self._savings, self._go_on, self._ranks)

    def _called(self, inputs: dict[str, Any]) -> Any:
        if not self._placed:
            self._place(inputs)
        try:
            with self._stage.weights:
                self._guard = self._guard or self._set_up(inputs)
                for feature in self._of_calls:
                    feature.begin_call()
                output = self._guard(**inputs)
                for feature in self._of_calls:
                    feature.end_call(self._stage.report.steps[-1])
        except BaseException:
            self._placed = False  # after an out-of-memory error, it may have to be moved out
            raise
        return self._returned(output)

    def _returned(self, output: Any) -> Any:
        return output

    def _place(self, inputs: Mapping[str, Any]) -> None:
        setup = DenoiserSetup(self._stage, inputs, self._savings)
        self._stage.place(lambda: estimate_activation_bytes(setup, self._known, self._features))
        self._placed = True

    def _go_on(self, stage: ComponentStage, savings: tuple[str, ...]) -> None:
        """Switch to a stage and savings: the next call places and sets it up, with the overrides learned so far."""
        for feature in self._features:
            feature.reset(stage.name)
        if self._guard:
            self._known, self._standing = self._guard.learned or self._known, self._guard.failure_state
        self._stage, self._savings = stage, savings
        self._guard, self._of_calls, self._placed = None, [], False

    def _set_up(self, inputs: dict[str, Any]) -> StageGuard:
        stage = self._stage
        setup = DenoiserSetup(stage, inputs, self._savings)
        self._of_calls = of_calls = list(filter(None, (feature.of_calls(setup) for feature in self._features)))
        rerun = stage.weights.shell(stage.module)
        call: Callable[..., Any] = rerun
        for feature in of_calls:
            call = feature.wrap_rerun(call)
        for feature in of_calls:
            call = feature.wrap_guarded(call, rerun=True)

        def peak_inside() -> torch.Tensor | None:
            return next((peak for each in of_calls if (peak := each.peak_inside()) is not None), None)

        guard = stage.guard(
            stage.module,
            stage.learner(stage.module, partial(build_attempt, stage, of_calls), self._known, stage.blocks),
            rerun=call if call is rerun else with_forward(rerun, call),
            peak_inside=peak_inside,
            constant=(PROMPT,),
            pending=next((each.pending for each in self._features if each.pending), None),
        )
        failures, stays = self._standing
        failed = stage.policy.scope is Scope.RUN and stage.report.reruns > 0  # also of the denoiser before this one
        guard.resume_from(failures, stays or failed)
        return guard


class GuardedDenoiser(GuardedCalls):
    """Guarded calls of the denoiser in one run. Returns float32, so that guidance and scheduler compute in float32."""

    def __init__(self, stage: ComponentStage, features: Sequence[Feature]):
        super().__init__(stage, features, stage.handle.ranks)
        self._known, notes = _known(stage)
        for note in notes:
            stage.report.note(note)
        self._started = False
        self._earlier: PrecisionOverrides | None = None  # overrides that another denoiser learned in this run

    def _returned(self, output: Any) -> Any:
        stage, learned = self._stage, self._guard and self._guard.learned
        if learned:
            update_cache(stage.handle, stage.memory_key, learned)
        stage.report.learned = (
            self._earlier.with_component(stage.name, learned) if self._earlier and learned else learned
        )
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.float, output)

    def _place(self, inputs: Mapping[str, Any]) -> None:
        """Place the denoiser, after the components before it may leave the device."""
        handle = self._stage.handle
        handle.finish(*ENCODERS, *(name for name in handle.family.denoisers if name != self._stage.name))
        super()._place(inputs)
        if not self._started:  # later, the report has its own
            self._started, self._earlier = True, self._stage.report.learned


def build_attempt(
    stage: ComponentStage, features: Sequence[CallFeature], overrides: PrecisionOverrides
) -> HalfPrecisionForward:
    """Build the attempt in half precision, by the plan, the overrides and the features."""
    options: dict[str, Any] = {"onloaded": stage.weights.shell, "device": stage.handle.store.placement.device}
    options |= options_of(features) | stage.numerics
    made = build_half_precision_forward(stage.module, overrides, stage.plan.dtype, **options)
    made = wrapped(made, features)
    run = made.run
    for feature in features:
        run = feature.wrap_guarded(run, rerun=False)
    return replace(made, run=run)


def _known(stage: ComponentStage) -> tuple[PrecisionOverrides, tuple[str, ...]]:
    """Return the overrides of earlier runs, if this run learns, and lines for the report."""
    if not stage.learns:
        return NOTHING, (PROFILE_UNUSED,) * bool(stage.handle.profile)
    load = partial(load_profile, stage.handle, stage.memory_key)
    known, notes = stage.handle.ranks.broadcast_from_rank0(load)
    if stage.handle.family.also_denoise:  # each denoiser has its own profile
        notes = tuple(joined(": ", (stage.name, note)) for note in notes)
    return known, notes
