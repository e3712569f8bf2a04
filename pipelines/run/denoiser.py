"""The denoiser that a diffusers pipeline is given: its calls under the guard, with the features of the run, in the
fastest way for which there is room."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.fallback import HalfPrecisionForward, build_half_precision_forward
from ...precision.guard import StageGuard
from ...precision.overrides import NOTHING, PrecisionOverrides
from ...precision.shallow_copy import reporting, with_forward
from ..families.spec import ENCODERS, PROMPT
from ..weights.activation_memory import estimate_activation_bytes
from ..weights.cfg_batch import split_cfg_batch
from ..weights.offload import Offload
from ..weights.oom_fallback import ExecutionOption, FallbackStep
from .feature import CallFeature, DenoiserSetup, Feature, Run
from .features import features_of
from .profiles import load_profile, update_cache
from .stage import ComponentStage


def guarded_denoiser(stage: ComponentStage, features: Sequence[Feature] | None = None) -> torch.nn.Module:
    """A shell of the denoiser that runs as the stage's plan says. The original, which it shares weights with, is
    loaded for it and not touched.

    features: of the run; None: those of single calls.
    """
    if features is None:
        features = features_of(Run(stage.handle, stage.plan, stage.report))
    call: Callable[..., Any] = GuardedDenoiser(stage, features)
    for feature in features:
        call = feature.wrap_denoiser(stage, call)
    shell = with_forward(stage.module, call)
    return reporting(shell, dtype=torch.float32, device=stage.handle.store.placement.device)


def ways_to_denoise(
    stage: ComponentStage,
    inputs: Mapping[str, Any],
    known: PrecisionOverrides = NOTHING,
    take: Callable[[ComponentStage, bool, bool], object] = lambda *_: None,
    cached: int = 0,
) -> Iterator[ExecutionOption]:
    """Yield the ways to make the calls of a run, the fastest first.

    ProcessGroup count alike, by the one that takes most: what they have to agree on may hang on the way.

    inputs: of a call. take: is given the stage, whether both halves of its batch are computed one after the other, and
    whether steps are cached.
    cached: how many calls of a step have values in a step cache; 0: there is none.
    """
    ranks = stage.handle.ranks
    parted = split_cfg_batch(inputs) if ranks.alone else []  # ranks make the same calls, whatever room each has
    for offload, kind in stage.ways():
        for apart in (False, True)[: max(len(parted), 1)]:
            given = parted[0] if apart else inputs
            for calls in dict.fromkeys((cached * (1 + apart), 0)):
                said = [offload, "halves apart" if apart else "", "no step cache" if cached and not calls else ""]
                yield ExecutionOption(
                    ", ".join(filter(None, said)),
                    kind.weights_at_once(),
                    ranks.all_reduce_max(kind.counted(partial(estimate_activation_bytes, kind, given, known, calls))),
                    partial(take, kind, apart, bool(calls)),
                )


class GuardedDenoiser:
    """Calls of the denoiser in one run. It returns float32, so that guidance and scheduler compute in that."""

    def __init__(self, stage: ComponentStage, features: Sequence[Feature]):
        self._stage = stage
        self._features = features
        self._signature = inspect.signature(stage.module.forward)
        self._known, notes = _known(stage)
        stage.report.notes += notes
        self._earlier: PrecisionOverrides | None = None  # what another denoiser learned in this run
        self._guard: StageGuard | None = None
        self._of_calls: list[CallFeature] = []
        self._cached = any(
            feature.keeps_calls(stage) for feature in features
        )  # values of each call may stay on the device
        self._foreseen = self._placed = False
        self._apart = False  # both halves of a batch are computed one after the other
        self._oom_fallback = stage.oom_fallback()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._signature.bind(*args, **kwargs).arguments
        if not self._stage.handle.ranks.alone:  # made once more, the other ranks would wait in another call
            return self._called(inputs)
        return self._oom_fallback.run(partial(self._called, inputs), self._fallback_steps(inputs))

    def _called(self, inputs: dict[str, Any]) -> Any:
        if not self._foreseen and (room := self._stage.room()):
            ways = ways_to_denoise(self._stage, inputs, self._known, self._go_on, self._calls_cached())
            self._oom_fallback.choose_upfront(ways, -self._stage.handle.ranks.all_reduce_max(-room))  # on each
        self._foreseen = True
        if not self._placed:
            self._place(split_cfg_batch(inputs)[0] if self._apart else inputs)
        try:
            with self._stage.weights:
                self._guard = self._guard or self._set_up(inputs)
                for feature in self._of_calls:
                    feature.begin_call()
                output = self._guard(**inputs)
                self._note(self._guard)
        except BaseException:
            self._placed = False  # where memory ran out, it may have to leave for a while
            raise
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.float, output)

    def _note(self, guard: StageGuard) -> None:
        """Note what came of a call."""
        stage = self._stage
        for feature in self._of_calls:
            feature.end_call(stage.report.steps[-1])
        learned = guard.learned
        if learned:
            update_cache(stage.handle, stage.name, stage.plan.numerics, learned)
        stage.report.learned = (
            self._earlier.with_component(stage.name, learned) if self._earlier and learned else learned
        )

    def _place(self, inputs: Mapping[str, Any]) -> None:
        """What came before may make room for it."""
        stage = self._stage
        stage.handle.finish(*ENCODERS, *(name for name in stage.handle.family.denoisers if name != stage.name))
        calls = self._calls_cached() * (1 + self._apart)
        stage.place(lambda: estimate_activation_bytes(stage, inputs, self._known, calls))
        if self._guard is None:
            self._earlier = stage.report.learned
        self._placed = True

    def _calls_cached(self) -> int:
        """Return how many calls of a step have values in the cache, where no batch is halved."""
        return self._stage.report.calls_per_step if self._cached else 0

    def _go_on(self, stage: ComponentStage, apart: bool, cached: bool) -> None:
        """Have the next call set up the stage, with what this run learned so far."""
        for feature in self._features:
            feature.reset(stage.name)
        if self._guard and self._guard.learned:
            self._known = self._guard.learned
        self._stage, self._apart, self._cached = stage, apart, self._cached and cached
        self._guard, self._of_calls, self._placed = None, [], False

    def _fallback_steps(self, inputs: Mapping[str, Any]) -> list[FallbackStep]:
        """Cheaper ways to make the calls of this run, after which it is placed anew."""

        def uncached() -> str:
            if not self._cached:
                return ""
            self._go_on(self._stage, self._apart, False)
            return "no step cache"

        def halves_apart() -> str:
            if self._apart or len(split_cfg_batch(inputs)) < 2:
                return ""
            self._go_on(self._stage, True, self._cached)
            return "both halves of its batch one after the other"

        def in_parts(offload: Offload) -> str:
            if cheaper := self._stage.cheaper(offload):
                self._go_on(cheaper, self._apart, self._cached)
            return f"offload '{offload.value}'" if cheaper else ""

        return [uncached, halves_apart, partial(in_parts, Offload.GROUP), partial(in_parts, Offload.SEQUENTIAL)]

    def _set_up(self, inputs: dict[str, Any]) -> StageGuard:
        stage = self._stage
        setup = DenoiserSetup(stage, inputs, self._apart, self._cached)
        self._of_calls = of_calls = list(filter(None, (feature.of_calls(setup) for feature in self._features)))
        rerun = stage.weights.shell(stage.module)
        call: Callable[..., Any] = rerun
        for feature in of_calls:
            call = feature.wrap_rerun(call)
        for feature in of_calls:
            call = feature.wrap_guarded(call, rerun=True)

        def peak_inside() -> torch.Tensor | None:
            return next((peak for each in of_calls if (peak := each.peak_inside()) is not None), None)

        return stage.guard(
            stage.module,
            stage.learner(stage.module, partial(build_attempt, stage, of_calls), stage.anatomy, self._known),
            rerun=call if call is rerun else with_forward(rerun, call),
            peak_inside=peak_inside,
            constant=(PROMPT,),
            pending=next((each.pending for each in self._features if each.pending), None),
        )


def build_attempt(
    stage: ComponentStage, features: Sequence[CallFeature], overrides: PrecisionOverrides
) -> HalfPrecisionForward:
    """Build what is called in half precision, as the plan, earlier failures and the features ask for."""
    options: dict[str, Any] = {}
    for feature in features:
        options |= feature.build_options()
    made = build_half_precision_forward(
        stage.module,
        stage.anatomy,
        overrides,
        stage.plan.dtype,
        wide=stage.plan.wide,
        onloaded=stage.weights.shell,
        device=stage.handle.store.placement.device,
        tf32=stage.tf32,
        **options,
    )
    for feature in features:
        made = feature.wrap_attempt(made)
    run = made.run
    for feature in features:
        run = feature.wrap_guarded(run, rerun=False)
    return replace(made, run=run)


def _known(stage: ComponentStage) -> tuple[PrecisionOverrides, tuple[str, ...]]:
    """What earlier runs taught, where this one learns, and what to say about it."""
    if not stage.learns:
        return NOTHING, ()
    handle, parts = stage.handle, stage.anatomy.parts(dict(stage.module.named_modules()))
    load = partial(load_profile, handle, stage.name, stage.plan.numerics, parts)
    return load() if handle.ranks.alone else handle.ranks.broadcast_from_rank0(load)
