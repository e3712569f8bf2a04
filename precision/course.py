"""The account of one run's step cache: what becomes of each step, and what the run has drifted.

It waits for no number: a step's norms are read by the guard's transfer for the step's call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .drift import CachePolicy, CacheUse, Choice, Ledger
from .overflow import Pending

if TYPE_CHECKING:
    from .step_cache import StepCache

# what the sampler multiplies each of a step's outputs by, in their order: of both halves of a batch, or of two calls
Guidance = Sequence[float]


class Course:
    """What the step cache of one run has done so far. Its denoisers share it, since the budget is the run's.

    pending: the norms that the guard reads along with a call's ranges, and makes the same in all processes that compute
        the run together, so that each decides as the others do.
    """

    def __init__(self, policy: CachePolicy, steps: int):
        self.ledger = Ledger(policy, steps)
        self.pending = Pending()
        self._choice: Choice | None = None  # of the present step
        self._computed = self._skipped = 0  # calls of its denoisers' parts
        self._apart: list[torch.Tensor] = []  # of the present step's outputs: what the cache would have given, less it
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
        and not at the end of the run, and what was found by it tells nothing of the next one."""
        if self._latest is not None and self._latest is not cache:
            self._latest.release()
            self.ledger = self.ledger.another()
        self._latest = cache

    def count(self, *, skipped: bool) -> None:
        self._skipped += skipped
        self._computed += not skipped

    def choose(self) -> Choice:
        """Return what becomes of the present step. Its first call decides that; the others follow."""
        self._choice = self._choice or self.ledger.choice()
        return self._choice

    @property
    def chosen(self) -> Choice | None:
        return self._choice

    @property
    def reuses(self) -> bool:
        """Return whether the present step is cached."""
        return self._choice is Choice.REUSE

    def signal(self, off: torch.Tensor) -> None:
        """Note how far the first part's output is off in the present step, in parts of its norm. off: []."""
        self.pending.ask("signal", off)

    def compare(self, apart: list[torch.Tensor], guidance: Guidance) -> None:
        """Note how far the cache is off after guidance, where that is known of all outputs of the present step.

        apart: what it would have given in place of the latest call's outputs, less them.
        """
        apart = [*self._apart, *apart]
        if len(guidance) > 1 and len(apart) == 1:
            apart = [*apart[0].chunk(len(guidance))]
        if apart and len(apart) == len(guidance):
            guided = torch.stack([part * each for part, each in zip(guidance, apart, strict=True)]).sum(0)
            self.pending.ask("error", guided.norm())

    def keep(self, apart: list[torch.Tensor]) -> None:
        """Keep the same of a call that the guard has taken."""
        self._apart += apart

    def stepped(self, slope: float, latents: torch.Tensor) -> None:
        """Go on to the next step.

        slope: |d latents / d output| of this one. latents: that it made.
        """
        norm = self.pending.take("norm")  # of the latents before it; before the first one, nobody asked
        self.pending.ask("norm", latents.norm())
        signal, error = self.pending.take("signal"), self.pending.take("error")
        signal = math.nan if signal is None else signal
        weight = 0.0
        if norm is not None and 0 < norm < math.inf:
            weight = slope / norm
        elif norm is not None:
            self.stop("the latents are zero, or not finite")
        if self.reuses:
            self.ledger = self.ledger.reused(signal, weight)
        elif error is not None:
            self.ledger = self.ledger.checked(signal, error, weight)
        else:
            self.ledger = self.ledger.computed(weight)
        self._choice, self._apart = None, []

    def recompute(self, *, whole: bool) -> None:
        """Have the present call computed after all, since its attempt failed. whole: it is the step's first one, so
        none of the step is cached."""
        self._apart = []
        self.pending.drop("error")
        if whole:
            self._choice = Choice.COMPUTE
