"""What one run learns from the calls that fail: it watches the fp32 rerun, and builds the next attempt accordingly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from .dtypes import FP16_MAX
from .findings import Anatomy, Apart, Finding, find, found_in_half, taught
from .islands import Attempt
from .learned import NOTHING, STAY, Learned
from .observe import Agree, Peak, alone, first_broken, leaf_peaks
from .overflow import propagate_nonfinite_attention
from .wide import CannotWiden

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
LAYERS = Anatomy()  # of a module of which nothing is known


class Learner:
    """The attempt of a stage, built as what was learned so far asks for.

    module: the untouched original, which the rerun calls.
    build: builds the attempt, at the start and after each lesson.
    learned: what earlier runs taught.
    agree: makes what was measured the same in all processes that compute the stage together.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: str,
        build: Callable[[Learned], Attempt],
        anatomy: Anatomy = LAYERS,
        learned: Learned = NOTHING,
        agree: Agree = alone,
    ):
        self.module = module
        self.learned = learned
        self.attempt = build(learned)
        self._dtype = dtype
        self._build = build
        self._anatomy = anatomy
        self._agree = agree
        self._peaks: dict[str, Peak] = {}
        self._proven = NOTHING  # a call has come out right with it

    def watch(self, rerun: Callable[[], Result]) -> tuple[Result, Finding | None]:
        """Make the rerun. Returns its result, and what left the dtype's range in it; None where nothing did."""
        results: list[Result] = []
        blocks = () if self._anatomy.stream else self._anatomy.blocks
        also = *self._anatomy.groups, *blocks
        peaks = leaf_peaks(self.module, lambda: results.append(rerun()), also, self._agree)
        self._peaks = {name: peak for name, peak in peaks.items() if counts(self.module.get_submodule(name))}
        if self.attempt.everything:  # what its layers reach in float32 is no reason
            return results[0], None
        return results[0], find(self._peaks, self._anatomy, self._dtype, self.learned.parts, wide=self.attempt.wide)

    def locate(self, *args: Any, saturated: bool = False, **kwargs: Any) -> Finding:
        """Find where a call fails although nothing leaves the dtype's range in fp32: the half-precision call is made
        once more, not compiled.

        saturated: its output is finite, but reaches fp16's last value.
        """
        eager = self.attempt.eager
        module = eager if isinstance(eager, torch.nn.Module) else self.module
        limit = FP16_MAX if saturated else torch.inf
        with propagate_nonfinite_attention((args, kwargs)):
            name = first_broken(module, lambda: eager(*args, **kwargs), limit, self._agree)
        attempt, sums = self.attempt, self.attempt.sums
        apart = Apart(attempt.quantised, sums.layers if sums else ())
        everything = self.attempt.everything
        return found_in_half(
            name, self._peaks, self._anatomy, self._dtype, self.learned.islands, apart, everything=everything
        )

    def learn(self, finding: Finding) -> str:
        """Build the next attempt as the finding asks for. Returns what changes, in words; "" where nothing does."""
        known = replace(self.learned, everything=self.learned.everything or self.attempt.everything)
        learned, action = taught(known, finding, self._anatomy, self._dtype)
        if learned == known:
            return ""
        logger.info("%s: %s", finding.reason, action)
        if learned.whole_run_fp32:
            return self.stay()
        try:
            self.attempt = self._build(learned)
        except CannotWiden as error:
            logger.warning("%s", error)
            return self.stay()
        self.learned = learned
        return action

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Find out before the first call what of the attempt may be quantised, by a call with the same arguments."""
        assert self.attempt.measure
        self.attempt.measure(lambda: self.attempt.eager(*args, **kwargs))
        self.attempt = self._build(self.learned)

    def came_out_right(self, *args: Any, **kwargs: Any) -> None:
        """Note that a call of the attempt came out right, so what was learned helps. Where it is to be found out what
        its linear layers accumulate in, that is done by this call, made again.

        args, kwargs: of the call.
        """
        if self.attempt.probe:
            found = self.attempt.probe(lambda: self.attempt.eager(*args, **kwargs))
            self.learned = replace(self.learned, sums=found)
            self.attempt = self._build(self.learned)
        self._proven = self.learned

    def stay(self) -> str:
        """Give up half precision for the rest of the run, and say so in words. What no call came out right with is
        forgotten: it did not help, and later runs would pay for it."""
        self.learned = replace(self._proven, wide=self.learned.wide, whole_run_fp32=True)
        return STAY


def counts(layer: torch.nn.Module) -> bool:
    """Return whether a layer's peaks count. They do not where it only hands its input on, or computes in fp32 in the
    half-precision call too, like T5's `wo`."""
    weights = list(layer.parameters(recurse=False))
    in_fp32 = bool(weights) and all(weight.dtype is torch.float32 for weight in weights)
    return not (in_fp32 or isinstance(layer, torch.nn.Dropout))
