"""The ways to run a stage, from the one that costs least: the first one for which there is room, and where memory runs
out all the same, the same call again in the next cheaper way, each way once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch

from ...precision.memory import size
from ...trust.message import Message, Told
from .placement import PlainPlacement

Result = TypeVar("Result")
FallbackStep = Callable[[], str]  # makes what follows cheaper. Returns how, for the report; "" where it cannot

_MARGIN = 1.15  # of what is counted beside weights: cuDNN's and cuBLAS's workspaces and gaps come on top


class NoRoom(Told, torch.OutOfMemoryError):
    """There is no memory for a stage in any way that there is to run it."""


class ExecutionOption(NamedTuple):
    """A way to run a stage.

    said: how, for the report.
    weights, beside: bytes that are on the device at once.
    take: makes the calls that follow run like this.
    """

    said: str
    weights: int
    beside: int
    take: Callable[[], object] = lambda: None

    @property
    def takes(self) -> int:
        return self.weights + self.beside

    @property
    def advised(self) -> float:
        return self.weights + self.beside * _MARGIN

    def in_words(self) -> str:
        return Message("{} of weights and {} beside them", size(self.weights), size(self.beside))


class FailedEstimate(NamedTuple):
    """A way that seemed to fit, and in which memory ran out."""

    takes: int  # bytes, as they were counted
    has: int  # bytes that there were


def first_that_fits(
    ways: Iterable[ExecutionOption], has: int, failed_estimates: Sequence[FailedEstimate] = ()
) -> tuple[ExecutionOption, ExecutionOption, bool]:
    """Return the first way that fits in `has` bytes, what the very first one is, and whether it fits. Where none does,
    it is the one that takes least.

    ways: at least one, from the one that costs least time. Those behind the one that fits are not asked for.
    """
    met: list[ExecutionOption] = []
    for way in ways:
        met.append(way)
        if way.advised <= has and not any(way.takes >= each.takes and has <= each.has for each in failed_estimates):
            return way, met[0], True
    least = min(met, key=lambda way: way.takes)
    return least, met[0], least.takes <= has


class OomFallback:
    """The ways to run a stage. What was tried stays for its later calls.

    stage: as messages name it.
    first: the first step.
    note: is told each step that is taken.
    needs: returns what the stage needs, in words, where that was counted.
    failed_estimates: is added to, and lives as long as the model does: what ran out is not tried again with as much
        memory.
    sized: what it takes beside weights grows with the size of what is made.
    """

    def __init__(
        self,
        stage: str,
        first: FallbackStep,
        placement: PlainPlacement,
        note: Callable[[str], None],
        needs: Callable[[], str],
        failed_estimates: list[FailedEstimate],
        *,
        sized: bool,
    ):
        self._stage = stage
        self._first = first
        self._tried = 0  # steps
        self._placement = placement
        self._note = note
        self._needs = needs
        self._failed_estimates = failed_estimates
        self._sized = sized
        self._foreseen: FailedEstimate | None = None  # if memory runs out
        self._taken: list[str] = []

    def choose_upfront(self, ways: Iterable[ExecutionOption], has: int) -> None:
        """Take the first way that fits, and note why. Raises NoRoom, before anything is computed, where none does.

        has: bytes that the device has for the stage.
        """
        way, first, fits = first_that_fits(ways, has, self._failed_estimates)
        where = Message("{} that {} has for it", size(has), self._placement.device)
        if not fits:
            raise NoRoom(
                "{}: there is not enough memory, in any way that there is to run it. {}, which takes least, takes {}, "
                "of {}. {}",
                self._stage,
                way.said,
                way.in_words(),
                where,
                self._what_would_fit(way, has),
            )
        instead = "" if way is first else Message("; {} would take {}", first.said, first.in_words())
        self._note(
            Message("{}: offload auto chose {}: {}, of {}{}", self._stage, way.said, way.in_words(), where, instead)
        )
        way.take()
        self._foreseen = FailedEstimate(way.takes, has)

    def _what_would_fit(self, way: ExecutionOption, has: int) -> str:
        other = "Close what else uses the card, or take a card with more memory."
        part = (has - way.weights) / (way.beside * _MARGIN) if way.beside else 0
        if not self._sized:
            return other
        if part < 0.01:
            return f"No size would fit. {other}"
        return f"About {part:.0%} of this size (width × height × frames) would fit: choose less. {other}"

    def run(self, call: Callable[[], Result], steps: Sequence[FallbackStep] = ()) -> Result:
        """Make a call, and again where memory runs out in it. Raises NoRoom at the end of the fallback.

        steps: those after the first one, the same in each call. They are not kept: most hold who holds the fallback.
        """
        while True:
            try:
                return call()
            except RuntimeError as error:
                if isinstance(error, NoRoom) or not ran_out(error):
                    raise
                failed = error
                traceback.clear_frames(failed.__traceback__)  # which hold what the call had made
            self._next(failed, steps)

    def _next(self, failed: RuntimeError, steps: Sequence[FallbackStep]) -> None:
        before = self._placement.memory()
        self._placement.give_back()
        if self._foreseen:
            self._failed_estimates.append(self._foreseen)
            self._foreseen = None
        for step in (self._first, *steps)[self._tried :]:
            self._tried += 1
            if how := step():
                self._taken.append(how)
                self._note(Message("{}: memory ran out; went on with {}", self._stage, how))
                return
        tried = f" Tried: {'; '.join(self._taken)}." if self._taken else ""
        has = f" {self._placement.device} has {size(before.total)}, {size(before.free)} of it free." if before else ""
        raise NoRoom(
            "{}: out of memory, all fallbacks failed.{}{}{} Choose a smaller size, fewer frames or a "
            "smaller batch, close what else uses the card, or take a card with more memory. PyTorch said: {}",
            self._stage,
            tried,
            has,
            self._needs(),
            first_line(failed),
        ) from failed


def check_once_more(error: RuntimeError, placement: PlainPlacement, *, again: bool) -> None:
    """Raise the error of a stage unless memory ran out beside its model, for embeddings, noise, or what a scheduler
    computes: then it may run once more with nothing on the device.

    again: it did so already. Raises NoRoom then.
    """
    if isinstance(error, NoRoom) or not ran_out(error):
        raise error
    if again:
        raise NoRoom(
            "Memory ran out, with nothing else of the model on {}. Choose a smaller size, close what else uses the "
            "card, or take a card with more memory. PyTorch said: {}",
            placement.device,
            first_line(error),
        ) from error
    traceback.clear_frames(error.__traceback__)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def ran_out(error: BaseException) -> bool:
    """Return whether there was no memory, as PyTorch says it of CUDA, and of other devices and page-locked memory."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in first_line(error).lower()
