"""The error estimate of a step cache: what each cached step is estimated to add to a run's drift, and which steps are
cached because of it. Pure decisions on plain numbers.

The drift is the norm of the difference to the latents of the same run without a cache, as a share of their norm. A step
whose output is off by a share ε moves the latents by about ε times what the step changes them by. Samplers carry such
an error on to the end nearly unchanged. So the errors of all cached steps are added up, as if all pointed the same
way, and multiplied by GROWTH, which was measured.

The error of a cached step's output is unknown. The error of its first block's extrapolation is known in every step, and
is called the signal. The ratio of both is measured whenever a step that could have been cached is computed and
compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..trust.message import Message


@dataclass(frozen=True)
class CachePolicy:
    """The user's settings of a step cache."""

    error: float = 0.02  # target error: the estimated drift that a run may have; 0: every step is computed
    check_every: int = 4  # every so many steps that could be cached, one is computed and compared


ORDER = 2  # degree of the extrapolated polynomial, which goes through ORDER + 1 computed steps
FIRST, LAST = 3, 1  # steps at either end that are always computed
MARGIN = 1.2  # a step is cached if the target error allows MARGIN times the error that it is estimated to add

GROWTH = 1.4  # the largest growth of an error until the end of a run, measured on trained models (docs/step_cache.md)
LEAST = 1e-6  # the smallest signal that a ratio is taken of: smaller ones are rounding errors
NOT_FINITE = "the extrapolated output is NaN or infinite"


def extrapolation_weights(at: Sequence[int], wanted: int) -> list[float]:
    """Return the Lagrange weights of some steps: the weighted sum of their values is the value at another step of the
    polynomial through all of them."""
    return [math.prod((wanted - other) / (step - other) for other in at if other != step) for step in at]


class CacheDecision(Enum):
    """What to do with a step that could be cached."""

    COMPUTE = "computed"  # and compared with the cache's output
    REUSE = "cached"


@dataclass(frozen=True)
class CacheUse:
    """Statistics of a step cache in a run."""

    target: float  # largest drift allowed
    steps: int  # steps of the run so far
    cached: int  # cached steps
    skipped: float  # share of all calls of the denoiser's blocks
    compared: int  # steps that were computed and compared with the cache's output
    drift: float  # estimate so far
    largest: float  # the largest drift that a compared step would have added
    stopped: str = ""  # why the cache stopped

    @property
    def over_target(self) -> bool:
        return self.drift > self.target

    def in_short(self) -> str:
        """Return a few words; "" if nothing was cached."""
        if not self.cached:
            return ""
        return Message("{} of {} steps cached at an estimated error of {:.2%}", self.cached, self.steps, self.drift)

    def warning(self) -> str:
        """Say that the estimate is over the target; "" if it is not."""
        if not self.over_target:
            return ""
        return Message(
            "The step cache changed the latents by an estimated {:.2%}, more than the target of {:.2%}: for a closer "
            "result, lower 'check_every' or 'error' in Step Cache, or remove the node.",
            self.drift,
            self.target,
        )

    def __str__(self) -> str:
        stopped = f"; stopped: {self.stopped}" if self.stopped else ""
        return (
            f"{self.cached} of {self.steps} steps cached, {self.skipped:.1%} of block calls skipped; estimated error "
            f"{self.drift:.3%}, target {self.target:.3%}; {self.compared} steps compared, with an error of at most "
            f"{self.largest:.3%} each{stopped}"
        )


@dataclass(frozen=True)
class ErrorEstimate:
    """Measurements of a run's steps so far, and the drift estimated from them.

    A signal is the error of the first block's extrapolated output, as a share of its norm. An error is the same for
    the denoiser's output, after guidance.
    """

    policy: CachePolicy
    steps: int  # of the run
    at: int = 0  # the current step, counted from 0
    settled: float = 0.0  # drift by the cached steps before the last computed one
    open: tuple[tuple[int, float], ...] = ()  # (step, signal) of each cached step since then
    ratio: float | None = None  # output's error / signal; None before the first comparison
    changes: tuple[float, ...] = ()  # relative change of the latents in each step; known one step later
    latest: tuple[int, float] = (0, 0.0)  # (step, signal) of the latest measured step
    cached: tuple[int, ...] = ()  # the cached steps
    compared: tuple[float, ...] = ()  # drift that each compared step would have added
    stopped: str = ""  # why the cache stopped

    @property
    def drift(self) -> float:
        """The estimated drift so far."""
        opened = sum(signal * self._change(step) for step, signal in self.open)
        return self.settled + GROWTH * (self.ratio or 0.0) * opened

    @property
    def may_reuse(self) -> bool:
        """Whether the current step's position in the run allows it to be cached."""
        return not self.stopped and self.policy.error > 0 and FIRST <= self.at < self.steps - LAST

    def choice(self) -> CacheDecision:
        """Return what to do with the current step, which may be cached. The target error is spent evenly."""
        if self.ratio is None or len(self.open) + 1 >= self.policy.check_every:
            return CacheDecision.COMPUTE
        allowed = self.policy.error * (self.at + 1 - FIRST) / (self.steps - FIRST - LAST)
        adds = MARGIN * GROWTH * self.ratio * self.predicted_signal() * self._change(self.at)
        return CacheDecision.REUSE if self.drift + adds <= allowed else CacheDecision.COMPUTE

    def predicted_signal(self) -> float:
        """Return the current step's signal predicted from the latest: the error of polynomial extrapolation grows with
        the product of the distances to its supporting steps."""
        at, signal = self.latest
        return signal * self._departure(self.at) / self._departure(at)

    def _departure(self, at: int) -> int:
        through = [step for step in range(at) if step not in self.cached][-ORDER - 1 :]
        return math.prod(at - step for step in through)

    def _change(self, step: int) -> float:
        """Return a step's change of the latents; the latest known one if it is not known yet."""
        return self.changes[min(step, len(self.changes) - 1)] if self.changes else 0.0

    def with_change(self, change: float | None) -> ErrorEstimate:
        """Add one more step's change of the latents, in order. None: not measured."""
        if change is None:
            return replace(self, changes=(*self.changes, self._change(self.at)))
        if not 0 <= change < math.inf:
            return self.stop("the latents are zero, NaN or infinite")
        return replace(self, changes=(*self.changes, change))

    def after_reuse(self, signal: float) -> ErrorEstimate:
        """Advance after a cached step. If its signal is not finite, the prediction counts, and the cache stops."""
        known = self
        if not math.isfinite(signal):
            known, signal = self.stop(NOT_FINITE), self.predicted_signal()
        opened, cached = (*self.open, (self.at, signal)), (*self.cached, self.at)
        return replace(known, at=self.at + 1, open=opened, latest=(self.at, signal), cached=cached)

    def after_compute(self) -> ErrorEstimate:
        """Advance after a step that was computed but not compared."""
        return replace(self, at=self.at + 1, settled=self.drift, open=())

    def after_comparison(self, signal: float, error: float) -> ErrorEstimate:
        """Advance after a step that was computed and compared. Its ratio also counts for the cached steps before it,
        which are nearer to the computed steps that they were extrapolated from.

        error: the error of the cache's output.
        """
        if not math.isfinite(error + signal):
            return self.stop(NOT_FINITE).after_compute()
        known = replace(self, ratio=error / signal) if signal > LEAST else self
        if known.drift >= self.policy.error:
            known = known.stop(f"the target error is reached at step {self.at + 1}")
        compared = (*self.compared, error * self._change(self.at))
        return replace(known, compared=compared, latest=(self.at, signal)).after_compute()

    def with_another_denoiser(self) -> ErrorEstimate:
        """Continue with another denoiser, whose ratio is unknown."""
        return replace(self, settled=self.drift, open=(), ratio=None)

    def stop(self, why: str) -> ErrorEstimate:
        """Cache nothing more in this run."""
        return replace(self, stopped=self.stopped or why)
