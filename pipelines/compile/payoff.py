"""Whether 'auto' compiles a run of a sampler: only where that pays, by what runs of this process took.

A first run at a size is eager, and measured. From then on it is a matter of renting and buying: as long as eager runs
together lose less than a compile takes, they go on being eager, so that the sum is never more than twice the best that
a prophet could have chosen (the break-even rule of ski rental: Karlin, Manasse, Rudolph and Sleator, 1988). What is
compiled already, in this process or on disk, is used at once, unless it was measured to be slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .backends import EAGER, BackendChoice

if TYPE_CHECKING:
    from ...precision.policy import Precision
    from ...precision.report import RunReport, StepRecord
    from ..run.handle import PipelineHandle
    from ..run.sample import SampleSettings
    from ..weights.components import ComponentStore

COMPILE_GUESS = 60.0  # seconds; until this process has compiled once
FASTER_GUESS = 0.2  # of an eager step's time, which compiling saves; until it is measured


@dataclass
class Taken:
    """What calls of a denoiser took at one size, in seconds."""

    eager: float = 0.0  # a call; 0: not measured yet, as below
    compiled: float = 0.0
    lost: float = 0.0  # by eager runs, against compiled ones


@dataclass
class Measured:
    """What this process measured of a model's denoiser."""

    compile_seconds: float = 0.0  # 0: not measured yet
    sizes: dict[Hashable, Taken] = field(default_factory=dict)

    def at(self, size: Hashable) -> Taken:
        return self.sizes.setdefault(size, Taken())


_MEASURED: WeakKeyDictionary[ComponentStore, dict[Hashable, Measured]] = WeakKeyDictionary()


def decide(known: Measured, size: Hashable, calls: int, *, at_hand: bool) -> tuple[bool, str]:
    """Return whether a run compiles, and why.

    calls: of the denoiser in the run. at_hand: it is compiled already, in this process or on disk.
    """
    taken = known.at(size)
    if taken.compiled and taken.eager and taken.compiled >= taken.eager:
        return False, f"a step compiled took {taken.compiled:.2g} s here, and eager {taken.eager:.2g} s"
    if at_hand:
        return True, "compiled already"
    if not taken.eager:
        return False, "the first run at this size, to measure what compiling would save"
    total, cost = taken.lost + calls * _saving(taken), known.compile_seconds or COMPILE_GUESS
    took = "took" if known.compile_seconds else "takes about"
    run = f"{calls} × {taken.eager:.2g} s"
    return total >= cost, f"compiling {took} {cost:.2g} s, and this run of {run} brings what it saves to {total:.2g} s"


def learn(known: Measured, size: Hashable, steps: Sequence[StepRecord], *, compiled: bool, graphs: int) -> None:
    """Take in what a run's calls took. graphs: that were compiled in it."""
    seconds = [step.seconds - (step.rerun.seconds if step.rerun else 0.0) for step in steps if not step.cached]
    if len(seconds) < 2:
        return
    usual, taken = statistics.median(seconds[1:]), known.at(size)
    if not compiled:
        taken.eager = usual
        taken.lost += len(seconds) * _saving(taken)
        return
    taken.compiled = usual
    if graphs:
        known.compile_seconds = max(sum(seconds) - usual * len(seconds), 0.0)


def where_it_pays(handle: PipelineHandle, settings: SampleSettings, request: Precision | None) -> PipelineHandle:
    """The handle for one run: with the backend 'eager' where 'auto' chose another, and compiling would not pay."""
    choice = handle.backend
    if not choice.automatic or choice.name == EAGER:
        return handle
    calls = settings.computed_steps * (handle.family.guidance.calls if _guided(settings) else 1)
    pays, why = decide(_known(handle, request), _size(settings), calls, at_hand=_at_hand(handle, request))
    if pays:
        return replace(handle, backend=replace(choice, reason=f"{choice.reason}; {why}"))
    return replace(handle, backend=BackendChoice(EAGER, f"auto: not compiled: {why}", automatic=True))


def learn_from(handle: PipelineHandle, settings: SampleSettings, request: Precision | None, report: RunReport) -> None:
    """Take in what a run took whose backend 'auto' chose."""
    if handle.backend.automatic:
        compiled, graphs = report.backend != EAGER, (report.graphs or 0) - report.graphs_kept
        learn(_known(handle, request), _size(settings), report.steps, compiled=compiled, graphs=graphs)


def _saving(taken: Taken) -> float:
    return taken.eager - taken.compiled if taken.compiled else taken.eager * FASTER_GUESS


def _known(handle: PipelineHandle, request: Precision | None) -> Measured:
    from ...precision.policy import Component

    plan = handle.plan(Component.DENOISER, request)
    key = plan.dtype, plan.wide, handle.compile_options
    return _MEASURED.setdefault(handle.store, {}).setdefault(key, Measured())


def _size(settings: SampleSettings) -> Hashable:
    return settings.width, settings.height, settings.frames, _guided(settings)


def _guided(settings: SampleSettings) -> bool:
    return settings.guidance_scale is not None and settings.guidance_scale > 1


def _at_hand(handle: PipelineHandle, request: Precision | None) -> bool:
    from ...precision.policy import Component
    from .code import SUFFIX
    from .target import target_of

    store, plan = handle.store, handle.plan(Component.DENOISER, request)
    how = (handle.backend.name, handle.compile_options, plan.dtype)
    if any(key[2:5] == how for key in store.compiled):
        return True
    if handle.compiled is None or handle.backend.name != "inductor":
        return False
    target = target_of(store.model, plan, handle.compile_options, store.placement.device, handle.architecture)
    return (handle.compiled / f"{target.name}{SUFFIX}").exists()
