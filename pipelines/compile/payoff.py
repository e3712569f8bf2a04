"""Whether 'auto' compiles a run of a sampler: only where that pays, by what earlier runs took.

A first run at a size is eager, and measured. From then on it is a matter of renting and buying: as long as eager runs
together lose less than a compile takes, they go on being eager, so that the sum is never more than twice the best that
a prophet could have chosen (the break-even rule of ski rental: Karlin, Manasse, Rudolph and Sleator, 1988). What is
compiled already, in this process or on disk, is used at once, unless it was measured to be slower. What was measured is
kept beside the compiled code, so that runs of one process each, as in a queue without a browser, come to it as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import ConfigDict, Field

from ...trust.foreign import Foreign
from .. import measured
from ..parallel.group import here
from .backends import EAGER, MEASURED, BackendChoice

if TYPE_CHECKING:
    from ...precision.policy import Precision
    from ...precision.report import RunReport, StepRecord
    from ..run.handle import PipelineHandle
    from ..run.sample import SampleSettings

COMPILE_GUESS = 60.0  # seconds; until this process has compiled once
FASTER_GUESS = 0.2  # of an eager step's time, which compiling saves; until it is measured
_READ = ConfigDict(strict=False, allow_inf_nan=False)  # from an object, where strict would take an instance alone
_SIZES = 64  # that are remembered of a model; the others are measured anew
_Seconds = Annotated[float, Field(ge=0, le=1e7)]


@dataclass
class Taken:
    """What calls of a denoiser took at one size, in seconds."""

    __pydantic_config__: ClassVar[ConfigDict] = _READ

    eager: _Seconds = 0.0  # a call; 0: not measured yet, as below
    compiled: _Seconds = 0.0
    lost: _Seconds = 0.0  # by eager runs, against compiled ones


@dataclass
class Measured:
    """What was measured of a model's denoiser."""

    compile_seconds: float = 0.0  # 0: not measured yet
    sizes: dict[str, Taken] = field(default_factory=dict)

    def at(self, size: str) -> Taken:
        while size not in self.sizes and len(self.sizes) >= _SIZES:
            del self.sizes[next(iter(self.sizes))]
        return self.sizes.setdefault(size, Taken())


class _File(Foreign):
    """The same as JSON."""

    compile_seconds: _Seconds
    sizes: Annotated[dict[Annotated[str, Field(max_length=100)], Taken], Field(max_length=_SIZES)]


_MEASURED: dict[str, Measured] = {}  # by what was compiled for


def decide(known: Measured, size: str, calls: int, *, at_hand: bool, unit: str = "step") -> tuple[bool, str]:
    """Return whether a run compiles, and why.

    calls: of the network in the run. at_hand: it is compiled already, in this process or on disk. unit: what a call is
        called.
    """
    taken = known.at(size)
    if taken.compiled and taken.eager and taken.compiled >= taken.eager:
        return False, f"a {unit} compiled took {taken.compiled:.2g} s here, and eager {taken.eager:.2g} s"
    if at_hand:
        return True, "compiled already"
    if not taken.eager:
        return False, "the first run at this size, to measure what compiling would save"
    total, cost = taken.lost + calls * _saving(taken), known.compile_seconds or COMPILE_GUESS
    took = "took" if known.compile_seconds else "takes about"
    run = f"{calls} × {taken.eager:.2g} s"
    return total >= cost, f"compiling {took} {cost:.2g} s, and this run of {run} brings what it saves to {total:.2g} s"


def learn(known: Measured, size: str, steps: Sequence[StepRecord], *, compiled: bool, graphs: int) -> None:
    """Take in what a run's calls took. graphs: that were compiled in it."""
    seconds = [own_seconds(step) for step in steps if not step.cached]
    if len(seconds) > 1:
        take_in(known, size, seconds, compiled=compiled, graphs=graphs)


def own_seconds(step: StepRecord) -> float:
    """Return what a call took without its rerun."""
    return step.seconds - (step.rerun.seconds if step.rerun else 0.0)


def take_in(known: Measured, size: str, seconds: Sequence[float], *, compiled: bool, graphs: int) -> None:
    """Take in what the calls of a run took, which are alike, but for the first, which may have compiled and warms up
    what the others find. Of a single call, that is all there is to be known."""
    if not seconds:
        return
    taken = known.at(size)
    usual = statistics.median(seconds[1:] or seconds)
    if not compiled:
        taken.eager = usual
        taken.lost += len(seconds) * _saving(taken)
        return
    if graphs and len(seconds) == 1:
        usual = taken.compiled or taken.eager * (1 - FASTER_GUESS)
    taken.compiled = usual
    if graphs:
        known.compile_seconds = max(sum(seconds) - usual * len(seconds), 0.0)


def where_it_pays(handle: PipelineHandle, settings: SampleSettings, request: Precision | None) -> PipelineHandle:
    """The handle for one run: with the backend 'eager' where 'auto' chose another, and compiling would not pay.

    Quantised layers are compiled at once: eager, they take longer than in half precision.
    """
    from ...precision.policy import Component

    choice = handle.backend
    if not choice.automatic or choice.name == EAGER or handle.plan(Component.DENOISER, request).quantised:
        return handle
    calls = settings.computed_steps * (handle.family.guidance.calls if _guided(settings) else 1)
    target = _target(handle, request)
    (known, _), at_hand = measured_of(handle, target), _at_hand(handle, request, target)
    pays, why = here().from_first(lambda: decide(known, _size(settings), calls, at_hand=at_hand))
    if pays:
        return replace(handle, backend=replace(choice, reason=f"{choice.reason}; {why}"))
    return replace(handle, backend=BackendChoice(EAGER, f"auto: not compiled: {why}", automatic=True))


def learn_from(handle: PipelineHandle, settings: SampleSettings, request: Precision | None, report: RunReport) -> None:
    """Take in, and keep, what a run took whose backend 'auto' chose."""
    if not handle.backend.automatic:
        return
    known, file = measured_of(handle, _target(handle, request))
    compiled, graphs = report.backend != EAGER, (report.graphs or 0) - report.graphs_kept
    learn(known, _size(settings), report.steps, compiled=compiled, graphs=graphs)
    keep(known, file)


def measured_of(handle: PipelineHandle, target: str) -> tuple[Measured, Path | None]:
    """Return what was measured of what is compiled for a target, and the file in which that is kept; None where nothing
    is."""
    file = measured.kept_in(handle.compiled, f"{target}.pace.json")
    if target not in _MEASURED:
        found = measured.read(file, _File, limit=2**16)
        _MEASURED[target] = Measured(found.compile_seconds, found.sizes) if found else Measured()
    return _MEASURED[target], file


def keep(known: Measured, file: Path | None) -> None:
    measured.write(file, asdict(known))


def is_kept(handle: PipelineHandle, target: str) -> bool:
    """Return whether what inductor compiled for a target is on disk."""
    from .code import SUFFIX

    return handle.compiled is not None and (handle.compiled / f"{target}{SUFFIX}").exists()


def _saving(taken: Taken) -> float:
    return taken.eager - taken.compiled if taken.compiled else taken.eager * FASTER_GUESS


def _target(handle: PipelineHandle, request: Precision | None) -> str:
    """What the denoiser is compiled for, as a file's name."""
    from ...precision.policy import Component
    from .target import target_of

    store, plan = handle.store, handle.plan(Component.DENOISER, request)
    return target_of(store.model, plan, handle.compile_options, store.placement.device, handle.architecture).name


def _size(settings: SampleSettings) -> str:
    guided = " guided" if _guided(settings) else ""
    return f"{settings.width}x{settings.height}, {settings.frames}{guided}"


def _guided(settings: SampleSettings) -> bool:
    return settings.guidance_scale is not None and settings.guidance_scale > 1


def _at_hand(handle: PipelineHandle, request: Precision | None, target: str) -> bool:
    """Whether it is compiled in this process or, by inductor, on disk."""
    from ...precision.policy import Component

    asked, how = handle.compile_options, (handle.backend.asked_for, handle.plan(Component.DENOISER, request).numerics)
    for name, _, backend, options, numerics, *_ in handle.store.compiled:
        taken = replace(options, attention=MEASURED) if asked.attention == MEASURED else options
        if name in handle.family.denoisers and (backend, numerics) == how and taken == asked:
            return True
    return handle.backend.name == "inductor" and is_kept(handle, target)
