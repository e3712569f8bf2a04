"""The ways to run a stage, the fastest first: it takes the first one for which there is room, and where memory runs out
all the same, the next one."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ...precision.dtypes import DTYPES
from ...precision.machine import first_line
from ...precision.memory import size
from ...precision.policy import Component
from ...trust.message import Message, Told
from ..parallel.group import ALONE, ProcessGroup
from .placement import bytes_of

if TYPE_CHECKING:
    from ..run.stage import ComponentStage

Result = TypeVar("Result")

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
    """How a stage runs, and what follows where memory runs out. What was tried stays for its later calls.

    stage: with offload 'auto', the first way that fits is taken before its first call.
    ranks: that make its calls together. They choose alike, and no call is made again: the others would wait in another.
    """

    def __init__(self, stage: ComponentStage, ranks: ProcessGroup = ALONE):
        self._stage = stage
        self._words = stage.plan.component.value.replace("_", " ")
        self._ranks = ranks
        self._store, self._placement = stage.handle.store, stage.handle.store.placement
        self._failed_estimates = self._store.failed_estimates.setdefault(stage.name, [])
        self._chosen = False
        self._foreseen: FailedEstimate | None = None  # if memory runs out
        self._taken: list[str] = []

    def run(self, call: Callable[[], Result], ways: Callable[[], Iterable[ExecutionOption]] | None = None) -> Result:
        """Make a call, and again where memory runs out in it. Raises NoRoom where no way is left.

        ways: returns the way in which the call is made now, and those that take less memory; None: there is one alone.
        """
        if ways and not self._chosen and (room := self._stage.room()):
            self._choose(ways(), -self._ranks.all_reduce_max(-room))
        self._chosen = True
        if not self._ranks.alone:
            return call()
        while True:
            try:
                return call()
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                failed = error
                traceback.clear_frames(failed.__traceback__)  # which hold what the call had made
            self._go_on(failed, ways)

    def _choose(self, ways: Iterable[ExecutionOption], has: int) -> None:
        """Take the first way that fits, and note why. Raises NoRoom, before anything is computed, where none does.

        has: bytes that the device has for the stage.
        """
        way, first, fits = first_that_fits(ways, has, self._failed_estimates)
        where = Message("{} that {} has for it", size(has), self._placement.device)
        if not fits:
            raise NoRoom(
                "{}: there is not enough memory, whichever way it runs. {}, which takes least, takes {}, of {}. {}",
                *(self._words, way.said, way.in_words(), where, self._what_would_fit(way, has)),
            )
        instead = "" if way is first else Message("; {} would take {}", first.said, first.in_words())
        self._note(
            Message("{}: offload auto chose {}: {}, of {}{}", self._words, way.said, way.in_words(), where, instead)
        )
        way.take()
        self._foreseen = FailedEstimate(way.takes, has)

    def _what_would_fit(self, way: ExecutionOption, has: int) -> str:
        other = "Close what else uses the card, or take a card with more memory."
        part = (has - way.weights) / (way.beside * _MARGIN) if way.beside else 0
        if self._stage.plan.component in (Component.TEXT_ENCODER, Component.IMAGE_ENCODER):
            return other
        if part < 0.01:
            return f"No size would fit. {other}"
        return f"About {part:.0%} of this size (width × height × frames) would fit: choose less. {other}"

    def _go_on(self, failed: RuntimeError, ways: Callable[[], Iterable[ExecutionOption]] | None) -> None:
        before = self._placement.memory()
        gc.collect()  # what earlier calls had made may still wait in a reference cycle
        self._placement.give_back()
        if self._foreseen:
            self._failed_estimates.append(self._foreseen)
            self._foreseen = None
        following = next(islice(ways(), 1, None), None) if ways and self._taken else None
        if not self._taken:
            leave_alone = partial(self._store.leave_device, but=self._stage.name)
            following = ExecutionOption("nothing else on the device", 0, 0, leave_alone)
        if following:
            following.take()
            self._taken.append(following.said)
            self._note(Message("{}: memory ran out; went on with {}", self._words, following.said))
            return
        has = f" {self._placement.device} has {size(before.total)}, {size(before.free)} of it free." if before else ""
        raise NoRoom(
            "{}: out of memory, all fallbacks failed.{}{}{} Choose a smaller size, fewer frames or a "
            "smaller batch, close what else uses the card, or take a card with more memory. PyTorch said: {}",
            *(self._words, f" Tried: {'; '.join(self._taken)}.", has, self._needs(), first_line(failed)),
        ) from failed

    def _needs(self) -> str:
        store, name = self._store, self._stage.name
        found = [size(bytes_of(store.model.bare(name, DTYPES[self._stage.weights_in]))) + " of weights"]
        found += [f"{size(beside)} beside them" for key, beside in store.room.items() if key[0] == name][-1:]
        return f" A call needs {' and '.join(found)}."

    def _note(self, line: str) -> None:
        self._stage.report.note(line)


def ran_out(error: BaseException) -> bool:
    """Return whether there was no memory, as PyTorch says it of CUDA, and of other devices and page-locked memory. Of
    what has no way left, that was said already."""
    said = isinstance(error, torch.OutOfMemoryError) or "out of memory" in first_line(error).lower()
    return said and not isinstance(error, NoRoom)
