"""The error estimate of a step cache: how far a run's latents may drift, and what each cached step is estimated to add.
Pure decisions on plain numbers.

A step whose output is off by δ moves the latents by w·δ, where w is what the scheduler multiplies a denoiser's output
by. On normally distributed latents, a sampler carries an error, in parts of their norm, on to the end unchanged. So
the parts that all cached steps add are summed up, as if all pointed the same way, and multiplied by what guidance was
measured to make of them. What a cached step is off by is not known; what its first part is off by is, since that is
computed, and extrapolated too. The ratio of both is taken from comparisons, which are made whenever a step is computed
that could have been cached.

Whether a step is cached is decided before it is begun, by what its signal will be as that of the step before tells: the
signal itself is read with the output's range, and is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..trust.message import Message, joined


@dataclass(frozen=True)
class CachePolicy:
    """What the user asks of a step cache."""

    error: float = 0.02  # most drift of a run's latents, in parts of their norm; 0: every step is computed
    check_every: int = 4  # after so many steps that could be cached, less one, the next one is computed and compared


ORDER = 2  # of the polynomial that is extrapolated: it goes through one computed step more
FIRST, LAST = 3, 1  # steps at either end that are always computed
MARGIN = 1.2  # a step is cached where the budget allows for that much more than it is estimated to add

GROWTH = 1.4  # of an error until the end of a run, at most: measured on trained models (docs/step_cache.md)
LEAST = 1e-6  # of a signal from which a ratio is taken: what is smaller is rounding
NOT_FINITE = "what it extrapolates is not finite"


def coefficients(at: Sequence[int], wanted: int) -> list[float]:
    """Return what to multiply the values of some steps by, so that their sum is the value at another step of the
    polynomial through all of them: Taylor's series, with divided differences for derivatives."""
    return [math.prod((wanted - other) / (step - other) for other in at if other != step) for step in at]


class Choice(Enum):
    """What becomes of a step that could be cached."""

    COMPUTE = "computed"  # and compared with what the cache would have given
    REUSE = "cached"


@dataclass(frozen=True)
class CacheUse:
    """What a step cache came to in a run. Drift is in parts of the latents' norm."""

    budget: float
    steps: int  # of the run, as far as it has come
    cached: int  # of them
    skipped: float  # part of all calls of the denoiser's parts (its blocks) that were left out
    compared: int  # steps that were computed and compared with what the cache would have given
    drift: float  # of the run, as it is estimated
    largest: float  # that one step, of those that were compared, would have added
    stopped: str = ""  # why nothing was cached any more

    @property
    def broken(self) -> bool:
        return self.drift > self.budget

    def in_short(self) -> str:
        """Return a few words; "" where nothing was cached."""
        if not self.cached:
            return ""
        return Message("{} of {} steps cached at an estimated drift of {:.2%}", self.cached, self.steps, self.drift)

    def warning(self) -> str:
        """Say that the budget was broken; "" where it was kept."""
        if not self.broken:
            return ""
        broken = Message(
            "The step cache is over its target of {:.2%}: the latents have drifted by an estimated {:.2%}.",
            self.budget,
            self.drift,
        )
        advice = Message("Set a smaller 'check_every' or 'error' in Step Cache, or take it out.")
        return joined(" ", (broken, advice))

    def __str__(self) -> str:
        stopped = f"; stopped: {self.stopped}" if self.stopped else ""
        return (
            f"{self.cached} of {self.steps} steps cached, {self.skipped:.1%} of its blocks' calls left out; drift "
            f"{self.drift:.3%} as estimated, of {self.budget:.3%}; {self.compared} steps compared, of which one would "
            f"have added {self.largest:.3%} at most{stopped}"
        )


@dataclass(frozen=True)
class Ledger:
    """What has been spent of a run's budget.

    Drift is in parts of the latents' norm. A signal is how far the first part's output is off where it is extrapolated,
    in parts of its norm. A weight is the drift that an output adds for each unit of its error, in parts of the norm of
    the latents that the step begins from.
    """

    policy: CachePolicy
    steps: int  # of the run
    at: int = 0  # the present step, counted from 0
    settled: float = 0.0  # drift by the cached steps before the last computed one
    open: tuple[tuple[float, float], ...] = ()  # signal and weight of the cached steps since then
    ratio: float | None = None  # error of an output for each unit of its signal; None: never compared
    weight: float = 0.0  # of the step before
    latest: tuple[int, float] = (0, 0.0)  # step and signal: the latest one that was measured
    cached: tuple[int, ...] = ()  # steps
    compared: tuple[float, ...] = ()  # drift that each compared step would have added
    stopped: str = ""  # why nothing is cached any more

    @property
    def drift(self) -> float:
        """Return the drift so far, as it is estimated."""
        return self.settled + self._opened

    @property
    def _opened(self) -> float:
        return GROWTH * (self.ratio or 0.0) * sum(signal * weight for signal, weight in self.open)

    @property
    def may_reuse(self) -> bool:
        """Return whether the present step may be cached, as far as its place in the run tells."""
        return not self.stopped and self.policy.error > 0 and FIRST <= self.at < self.steps - LAST

    @property
    def allowed(self) -> float:
        """Return the drift that there may be after the present step: the budget is spent evenly."""
        return self.policy.error * (self.at + 1 - FIRST) / (self.steps - FIRST - LAST)

    def foreseen(self) -> float:
        """Return the signal of the present step that the latest one tells: a polynomial departs as the product of the
        distances to the steps that it goes through. Something was compared."""
        at, signal = self.latest
        return signal * self._departs(self.at) / self._departs(at)

    def _departs(self, at: int) -> int:
        through = [step for step in range(at) if step not in self.cached][-ORDER - 1 :]
        return math.prod(at - step for step in through)

    def choice(self) -> Choice:
        """Return what becomes of the present step, which may be cached."""
        if self.ratio is None or len(self.open) + 1 >= self.policy.check_every:
            return Choice.COMPUTE
        adds = MARGIN * GROWTH * self.ratio * self.foreseen() * self.weight
        return Choice.REUSE if self.drift + adds <= self.allowed else Choice.COMPUTE

    def reused(self, signal: float, weight: float) -> Ledger:
        """Go on from a step that was cached. Where its signal is not finite, it counts as foreseen, and is the last."""
        stopped = self.stopped
        if not math.isfinite(signal):
            signal, stopped = self.foreseen(), NOT_FINITE
        return replace(
            self,
            at=self.at + 1,
            open=(*self.open, (signal, weight)),
            weight=weight,
            latest=(self.at, signal),
            cached=(*self.cached, self.at),
            stopped=stopped,
        )

    def computed(self, weight: float) -> Ledger:
        """Go on from a step that was computed, and not compared."""
        return replace(self, at=self.at + 1, weight=weight, settled=self.drift, open=())

    def checked(self, signal: float, error: float, weight: float) -> Ledger:
        """Go on from a step that was computed and compared. What the cached steps before it added is estimated by what
        was found here, where they are furthest from the steps that they were extrapolated from.

        error: of the output that the cache would have given, in the norm that `weight` is for.
        """
        if not math.isfinite(error + signal):
            return replace(self.computed(weight), stopped=NOT_FINITE)
        known = replace(self, ratio=error / signal) if signal > LEAST else self
        stopped = f"the budget is spent, at step {self.at + 1}" if known.drift >= self.policy.error else self.stopped
        compared, latest = (*self.compared, error * weight), (self.at, signal)
        return replace(known, compared=compared, latest=latest, stopped=stopped).computed(weight)

    def another(self) -> Ledger:
        """Go on with another denoiser, of which nothing was compared yet."""
        return replace(self, settled=self.drift, open=(), ratio=None)
