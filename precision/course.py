"""The account of one run's step cache: what becomes of each step, and what the run has drifted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .drift import CachePolicy, CacheUse, Choice, Ledger
from .observe import Agree, alone

if TYPE_CHECKING:
    from .step_cache import StepCache

# what the sampler multiplies each of a step's outputs by, in their order: of both halves of a batch, or of two calls
Guidance = Sequence[float]


class Course:
    """What the step cache of one run has done so far. Its denoisers share it, since the budget is the run's.

    agree: makes what was measured the same in all processes that compute the run together, so that each decides as the
        others do.
    """

    def __init__(self, policy: CachePolicy, steps: int, agree: Agree = alone):
        self.ledger = Ledger(policy, steps)
        self._agree = agree
        self._choice: Choice | None = None  # of the present step
        self._signal = 0.0
        self._computed = self._skipped = 0  # calls of its denoisers' parts
        self._apart: list[torch.Tensor] = []  # of the present step's outputs: what the cache would have given, less it
        self._guidance: Guidance = (1.0,)
        self._off: tuple[torch.Tensor, float] | None = None  # the same after guidance, and its norm
        self._taken_back = False
        self._mixed = False  # a call of a cached step since the last computed one was computed again
        self._latest: StepCache | None = None  # of the denoiser that was called latest

    @property
    def use(self) -> CacheUse:
        ledger, calls = self.ledger, self._computed + self._skipped
        return CacheUse(
            budget=ledger.policy.error,
            steps=ledger.at,
            cached=len(ledger.cached),
            skipped=self._skipped / calls if calls else 0.0,
            compared=len(ledger.compared),
            drift=ledger.drift,
            largest=max(ledger.compared, default=0.0),
            stopped=ledger.stopped,
        )

    def stop(self, why: str) -> None:
        """Cache nothing more in this run."""
        self.ledger = replace(self.ledger, stopped=self.ledger.stopped or why)

    def calls(self, cache: StepCache) -> None:
        """Note that a denoiser is called. One that was called before it is done then: what was kept of it is let go,
        and not at the end of the run."""
        if self._latest is not None and self._latest is not cache:
            self._latest.release()
        self._latest = cache

    def count(self, *, skipped: bool) -> None:
        self._skipped += skipped
        self._computed += not skipped

    def choose(self, signal: Callable[[], float]) -> Choice:
        """Return what becomes of the present step. Its first call decides that, by its signal; the others follow."""
        if self._choice is None:
            self._signal = self._agreed(signal())
            self._choice = self.ledger.choice(self._signal)
        return self._choice

    @property
    def chosen(self) -> Choice | None:
        return self._choice

    @property
    def reuses(self) -> bool:
        """Return whether the present step is cached."""
        return self._choice is Choice.REUSE

    def compare(self, apart: list[torch.Tensor], guidance: Guidance) -> None:
        """Note what the cache would have given in place of outputs of the present step, less them."""
        self._apart += apart
        self._guidance = guidance
        self._off = self._guided()

    def take_back(self) -> list[torch.Tensor]:
        """Return what the cached steps since the last comparison were off by, each after guidance, as far as that of
        the present step tells. The caller takes it out of the run. Empty where the present step does not tell."""
        if self._off is None or self._mixed or not math.isfinite(self._off[1]):
            return []
        self._taken_back = True
        return [share * self._off[0] for share in self.ledger.shares]

    def stepped(self, weight: float) -> None:
        """Go on to the next step. weight: see Ledger."""
        weight = self._agreed(weight)
        if not math.isfinite(weight):
            self.stop("the latents are not finite")
            weight = 0.0
        self._mixed &= self.reuses
        if self.reuses:
            self.ledger = self.ledger.reused(self._signal, weight)
        elif self._off:
            self.ledger = self.ledger.checked(self._signal, self._off[1], weight, corrected=self._taken_back)
        else:
            self.ledger = self.ledger.computed(weight)
        self._choice, self._apart, self._off, self._taken_back = None, [], None, False

    def _guided(self) -> tuple[torch.Tensor, float] | None:
        """Return what the step's output would have been off by, after guidance, and its norm; None where that is not
        known."""
        apart, guidance = self._apart, self._guidance
        if len(guidance) > 1 and len(apart) == 1:
            apart = [*apart[0].chunk(len(guidance))]
        if not apart or len(apart) != len(guidance):
            return None
        guided = torch.stack([part * each for part, each in zip(guidance, apart, strict=True)]).sum(0)
        return guided, self._agreed(float(guided.norm()))

    def _agreed(self, value: float) -> float:
        """Return the largest of all processes' values, none of which is negative."""
        return float(self._agree(torch.tensor([value])))

    def recompute(self, *, whole: bool) -> None:
        """Have the present call computed after all, since its attempt failed. whole: it is the step's first one, so
        none of the step is cached."""
        self._apart, self._off = [], None
        if whole:
            self._choice = Choice.COMPUTE
        elif self.reuses:
            self._mixed = True
