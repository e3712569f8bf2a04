"""The error estimate of a step cache: what each cached step is estimated to add to a run's drift, and which steps are
cached because of it. Pure decisions on plain numbers.

The drift is the norm of the difference to the latents of the same run without a cache, as a share of their norm. A step
whose output is off by a share ε moves the latents by about ε times what the step changes them by. Samplers carry such
an error on to the end nearly unchanged. So the errors of all cached steps are added up, as if all pointed the same
way, and multiplied by GROWTH, which was measured.

The error of a cached step's output is not known. That of its first block is: it is computed and extrapolated in every
step, and is called the signal. The ratio of both is measured wherever a step that could have been cached is computed
and compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..trust.message import Message


@dataclass(frozen=True)
class CachePolicy:
    """What the user asks of a step cache."""

    error: float = 0.02  # target error: the estimated drift that a run may have; 0: every step is computed
    check_every: int = 4  # after so many steps that could be cached, less one, the next one is computed and compared


ORDER = 2  # of the polynomial that is extrapolated: it goes through one computed step more
FIRST, LAST = 3, 1  # steps at either end that are always computed
MARGIN = 1.2  # a step is cached where the target error allows for that much more than it is estimated to add

GROWTH = 1.4  # of an error until the end of a run, at most: measured on trained models (docs/step_cache.md)
LEAST = 1e-6  # of a signal from which a ratio is taken: what is smaller is rounding
NOT_FINITE = "what it extrapolates is NaN or infinite"


def extrapolation_weights(at: Sequence[int], wanted: int) -> list[float]:
    """Return what to multiply the values of some steps by, so that their sum is the value at another step of the
    polynomial through all of them (Lagrange)."""
    return [math.prod((wanted - other) / (step - other) for other in at if other != step) for step in at]


class CacheDecision(Enum):
    """What becomes of a step that could be cached."""

    COMPUTE = "computed"  # and compared with what the cache would have given
    REUSE = "cached"


@dataclass(frozen=True)
class CacheUse:
    """What a step cache did in a run."""

    target: float  # of the drift
    steps: int  # of the run, as far as it has come
    cached: int  # of them
    skipped: float  # share of all calls of the denoiser's blocks
    compared: int  # steps that were computed and compared with what the cache would have given
    drift: float  # estimated, of the run so far
    largest: float  # that one step, of those that were compared, would have added
    stopped: str = ""  # why nothing was cached any more

    @property
    def over_target(self) -> bool:
        return self.drift > self.target

    def in_short(self) -> str:
        """Return a few words; "" where nothing was cached."""
        if not self.cached:
            return ""
        return Message("{} of {} steps cached at an estimated error of {:.2%}", self.cached, self.steps, self.drift)

    def warning(self) -> str:
        """Say that the estimate is over the target; "" where it is not."""
        if not self.over_target:
            return ""
        return Message(
            "The step cache changed the latents by an estimated {:.2%}, more than the target of {:.2%}: for a closer "
            "result set a smaller 'check_every' or 'error' in Step Cache, or take it out.",
            self.drift,
            self.target,
        )

    def __str__(self) -> str:
        stopped = f"; stopped: {self.stopped}" if self.stopped else ""
        return (
            f"{self.cached} of {self.steps} steps cached, {self.skipped:.1%} of block calls skipped; estimated error "
            f"{self.drift:.3%}, target {self.target:.3%}; {self.compared} steps compared, of which one would have "
            f"added {self.largest:.3%} at most{stopped}"
        )


@dataclass(frozen=True)
class ErrorEstimate:
    """What is known of a run's steps so far, and the drift that follows from it.

    A signal is how far the first block's output is off where it is extrapolated, as a share of its norm. An error is
    the same of the denoiser's output, after guidance.
    """

    policy: CachePolicy
    steps: int  # of the run
    at: int = 0  # the present step, counted from 0
    settled: float = 0.0  # drift by the cached steps before the last computed one
    open: tuple[tuple[int, float], ...] = ()  # step and signal of the cached steps since then
    ratio: float | None = None  # of an output's error to its signal; None: never compared
    changes: tuple[float, ...] = ()  # of the latents in each step, as a share of their norm; known one step later
    latest: tuple[int, float] = (0, 0.0)  # step and signal: the latest one that was measured
    cached: tuple[int, ...] = ()  # steps
    compared: tuple[float, ...] = ()  # drift that each compared step would have added
    stopped: str = ""  # why nothing is cached any more

    @property
    def drift(self) -> float:
        """The estimated drift so far."""
        opened = sum(signal * self._change(step) for step, signal in self.open)
        return self.settled + GROWTH * (self.ratio or 0.0) * opened

    @property
    def may_reuse(self) -> bool:
        """Whether the present step may be cached, as far as its place in the run tells."""
        return not self.stopped and self.policy.error > 0 and FIRST <= self.at < self.steps - LAST

    def choice(self) -> CacheDecision:
        """Return what becomes of the present step, which may be cached. The target error is spent evenly."""
        if self.ratio is None or len(self.open) + 1 >= self.policy.check_every:
            return CacheDecision.COMPUTE
        allowed = self.policy.error * (self.at + 1 - FIRST) / (self.steps - FIRST - LAST)
        adds = MARGIN * GROWTH * self.ratio * self.predicted_signal() * self._change(self.at)
        return CacheDecision.REUSE if self.drift + adds <= allowed else CacheDecision.COMPUTE

    def predicted_signal(self) -> float:
        """Return the signal of the present step that the latest one tells: a polynomial departs from what it continues
        as the product of the distances to the steps that it goes through."""
        at, signal = self.latest
        return signal * self._departure(self.at) / self._departure(at)

    def _departure(self, at: int) -> int:
        through = [step for step in range(at) if step not in self.cached][-ORDER - 1 :]
        return math.prod(at - step for step in through)

    def _change(self, step: int) -> float:
        """Return what a step changes the latents by; as the latest known one, where it is not known yet."""
        return self.changes[min(step, len(self.changes) - 1)] if self.changes else 0.0

    def with_change(self, change: float | None) -> ErrorEstimate:
        """Take what one more step has changed the latents by, the first one first. None: not measured."""
        if change is None:
            return replace(self, changes=(*self.changes, self._change(self.at)))
        if not 0 <= change < math.inf:
            return self.stop("the latents are zero, NaN or infinite")
        return replace(self, changes=(*self.changes, change))

    def after_reuse(self, signal: float) -> ErrorEstimate:
        """Go on from a step that was cached. If its signal is not finite, it counts as predicted, and is the last."""
        known = self
        if not math.isfinite(signal):
            known, signal = self.stop(NOT_FINITE), self.predicted_signal()
        opened, cached = (*self.open, (self.at, signal)), (*self.cached, self.at)
        return replace(known, at=self.at + 1, open=opened, latest=(self.at, signal), cached=cached)

    def after_compute(self) -> ErrorEstimate:
        """Go on from a step that was computed, and not compared."""
        return replace(self, at=self.at + 1, settled=self.drift, open=())

    def after_comparison(self, signal: float, error: float) -> ErrorEstimate:
        """Go on from a step that was computed and compared. What the cached steps before it added is estimated by what
        was found here, where they are furthest from the steps that they were extrapolated from.

        error: of the output that the cache would have given.
        """
        if not math.isfinite(error + signal):
            return self.stop(NOT_FINITE).after_compute()
        known = replace(self, ratio=error / signal) if signal > LEAST else self
        if known.drift >= self.policy.error:
            known = known.stop(f"the target error is reached at step {self.at + 1}")
        compared = (*self.compared, error * self._change(self.at))
        return replace(known, compared=compared, latest=(self.at, signal)).after_compute()

    def with_another_denoiser(self) -> ErrorEstimate:
        """Go on with a denoiser of which nothing was compared yet."""
        return replace(self, settled=self.drift, open=(), ratio=None)

    def stop(self, why: str) -> ErrorEstimate:
        """Cache nothing more in this run."""
        return replace(self, stopped=self.stopped or why)
