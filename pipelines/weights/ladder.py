"""Memory that runs out in a stage: the same call again, in the next cheaper way, once down the ladder."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ...precision.peaks import size
from .placement import Placement

Result = TypeVar("Result")
Rung = Callable[[], str]  # makes what follows cheaper. Returns how, for the report; "" where it cannot


class NoRoom(torch.OutOfMemoryError):
    """Memory ran out in every way that there is to run a stage."""


class Ladder:
    """The ways to run a stage, from the one that costs least. What was tried stays for its later calls.

    stage: as messages name it.
    first: the first rung.
    note: is told each rung that is taken.
    needs: returns what the stage needs, in words, where that was counted.
    """

    def __init__(
        self,
        stage: str,
        first: Rung,
        placement: Placement,
        note: Callable[[str], None],
        needs: Callable[[], str],
    ):
        self._stage = stage
        self._first = first
        self._tried = 0  # rungs
        self._placement = placement
        self._note = note
        self._needs = needs
        self._taken: list[str] = []

    def survive(self, call: Callable[[], Result], rungs: Sequence[Rung] = ()) -> Result:
        """Make a call, and again where memory runs out in it. Raises NoRoom at the end of the ladder.

        rungs: those after the first one, the same in each call. They are not kept: most hold who holds the ladder.
        """
        while True:
            try:
                return call()
            except RuntimeError as error:
                if isinstance(error, NoRoom) or not ran_out(error):
                    raise
                failed = error
                traceback.clear_frames(failed.__traceback__)  # which hold what the call had made
            self._next(failed, rungs)

    def _next(self, failed: RuntimeError, rungs: Sequence[Rung]) -> None:
        before = self._placement.memory()
        self._placement.give_back()
        for rung in (self._first, *rungs)[self._tried :]:
            self._tried += 1
            if how := rung():
                self._taken.append(how)
                self._note(f"{self._stage}: memory ran out; went on with {how}")
                return
        tried = f" Tried: {'; '.join(self._taken)}." if self._taken else ""
        has = f" {self._placement.device} has {size(before.total)}, {size(before.free)} of it free." if before else ""
        raise NoRoom(
            f"{self._stage}: memory ran out, in every way that there is to run it.{tried}{has}{self._needs()} "
            "Choose a smaller size, fewer frames or a smaller batch, close what else uses the card, or take a card "
            f"with more memory. PyTorch said: {first_line(failed)}"
        ) from failed


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def ran_out(error: BaseException) -> bool:
    """Return whether there was no memory, as PyTorch says it of CUDA, and of other devices and page-locked memory."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in first_line(error).lower()
