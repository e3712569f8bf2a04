"""The second device's memory as tests see it: so many bytes for all of a run, or for what one stage computes with."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, PlainPlacement, bytes_on
from comfyui_onediff_guard.precision.guard import StageGuard
from small_runs import CUDA, opened


class Room:
    """What runs of a model find on the card, and what they take. Bytes that were there before them do not count."""

    def __init__(self, card: Any):
        self._card, self._total, self._store = card, card.total(), None
        self._stage, self._most, self._spare = "", 0, 0
        self.limit = float("inf")
        self.only = ""  # the stage whose calls the limit is for; "": all that goes to the card
        self.made: Counter[str] = Counter()  # of each stage, the most that one call took beside what was there
        self.beside: Counter[str] = Counter()  # the same, and what was there beside weights
        self.asked: list[int] = []  # room beside a component's weights

    def opened(self, model: str, offload: str = "none", precision: str = "fp32") -> PipelineHandle:
        """A handle of a store of its own."""
        stores._STORES.clear()
        _settle()
        self._others = self._card.used()
        handle = opened(model, offload, precision, placement=_Placement(self))
        self._store = handle.store
        return handle

    @property
    def used(self) -> int:
        return self._card.used() - self._others

    @property
    def most(self) -> int:
        """That was there at once, since the limit was set."""
        return max(self._most, self._card.most_used() - self._others)

    def anew(self) -> None:
        """Look at the most from here on."""
        self._most, _ = 0, self._card.reset_most_used()

    @contextmanager
    def limited(self, limit: float, only: str = "", spare: int = 0) -> Generator[None]:
        """spare: bytes that are there and nobody is told of: for latents, of which a small model has many."""
        self.limit, self.only, self._spare = limit, only, spare
        _settle()
        self.anew()
        self._set()
        try:
            yield
        finally:
            self.limit, self.only = float("inf"), ""
            self._set()

    def _set(self) -> None:
        holds = self.only in ("", self._stage) and self.limit < self._total
        self._card.set_total(int(self.limit) + self._spare + self._others if holds else self._total)

    @contextmanager
    def calls_watched(self) -> Generator[None]:
        """Know which stage calls its model, and what each call takes."""
        called = StageGuard.__call__

        def guarded(guard: StageGuard, *args: Any, **kwargs: Any) -> Any:
            if self.limit == float("inf"):
                _settle()
            self._stage, self._most, before = guard.stage, self.most, self.used
            components = self._store.components.values() if self._store else ()
            weights = sum(bytes_on(CUDA, component.module) for component in components)
            self._card.reset_most_used()
            self._set()
            try:
                return called(guard, *args, **kwargs)
            finally:
                most = self._card.most_used() - self._others
                self.made[guard.stage] = max(self.made[guard.stage], most - before)
                self.beside[guard.stage] = max(self.beside[guard.stage], most - weights)
                self._stage = ""
                self._set()

        with mock.patch.object(StageGuard, "__call__", guarded):
            yield

    def close(self) -> None:
        if self._store:
            self._store.empty()
        stores._STORES.clear()

    def taken_by(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """What it gives, and the most that was there at once beside what was there before."""
        _settle()
        self.anew()
        before = self.used
        made = run()
        return made, self.most - before


class _Placement(PlainPlacement):
    def __init__(self, room: Room):
        super().__init__(CUDA)
        self._room = room

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        self._room.asked.append(beside)
        super().to_device(name, module, beside)

    def memory(self) -> DeviceMemory:
        """While the limit is for one stage, too, all that asks is told of it."""
        total = int(min(self._room.limit, 1e15))
        return DeviceMemory(total, max(total - self._room.used, 0))


def _settle() -> None:
    """What was let go is gone: of what was sent away the device keeps the memory until the host has waited for it."""
    gc.collect()
    torch.cuda.synchronize()


def everything_away(handle: PipelineHandle) -> None:
    for name in handle.store.loaded():
        handle.store.offload_to_cpu(name)
    _settle()


def most_of(room: Room, handle: PipelineHandle, run: Callable[[], Any]) -> tuple[Any, int]:
    """What a run gave, and the most bytes that it held, where there is room for all."""
    everything_away(handle)
    room.anew()
    made = run()
    most = room.most
    everything_away(handle)
    return made, most


def ways(report: Any) -> list[str]:
    """That were taken where memory ran out."""
    return [note.rpartition(" with ")[2] for note in report.notes if "memory ran out" in note]


def chosen(report: Any) -> list[str]:
    """By offload `auto`."""
    return [note.partition("chose ")[2].partition(":")[0] for note in report.notes if "offload auto chose" in note]
