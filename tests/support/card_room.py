"""Memory of the second device: limit it for a whole run or for one stage, and measure what runs use."""

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
    """Available and used card memory of a model's runs. Memory used before the runs does not count."""

    def __init__(self, card: Any):
        self._card, self._total, self._store = card, card.total(), None
        self._stage, self._most, self._spare = "", 0, 0
        self.limit = float("inf")
        self.only = ""  # the limit applies to calls of this stage; "": to everything
        self.call_bytes: Counter[str] = Counter()  # per stage: the most that one call added
        self.bytes_beside_weights: Counter[str] = Counter()  # per stage: the most in use without weights
        self.requested: list[int] = []  # memory requested beside a component's weights

    def opened(self, model: str, offload: str = "none", precision: str = "fp32") -> PipelineHandle:
        """A handle with a new store."""
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
    def peak(self) -> int:
        """Peak memory since the limit was set."""
        return max(self._most, self._card.most_used() - self._others)

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self._most, _ = 0, self._card.reset_most_used()

    @contextmanager
    def limited(self, limit: float, only: str = "", spare: int = 0) -> Generator[None]:
        """spare: additional bytes that are not reported: for latents, which are large in a small model."""
        self.limit, self.only, self._spare = limit, only, spare
        _settle()
        self.reset_peak()
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
        """Record which stage calls its model, and the memory of each call."""
        called = StageGuard.__call__

        def guarded(guard: StageGuard, *args: Any, **kwargs: Any) -> Any:
            if self.limit == float("inf"):
                _settle()
            self._stage, self._most, before = guard.stage, self.peak, self.used
            components = self._store.components.values() if self._store else ()
            weights = sum(bytes_on(CUDA, component.module) for component in components)
            self._card.reset_most_used()
            self._set()
            try:
                return called(guard, *args, **kwargs)
            finally:
                most = self._card.most_used() - self._others
                self.call_bytes[guard.stage] = max(self.call_bytes[guard.stage], most - before)
                self.bytes_beside_weights[guard.stage] = max(self.bytes_beside_weights[guard.stage], most - weights)
                self._stage = ""
                self._set()

        with mock.patch.object(StageGuard, "__call__", guarded):
            yield

    def close(self) -> None:
        if self._store:
            self._store.empty()
        stores._STORES.clear()

    def measure(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """(result, peak memory beyond the start)"""
        _settle()
        self.reset_peak()
        before = self.used
        made = run()
        return made, self.peak - before


class _Placement(PlainPlacement):
    def __init__(self, room: Room):
        super().__init__(CUDA)
        self._room = room

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        self._room.requested.append(beside)
        super().to_device(name, module, beside)

    def memory(self) -> DeviceMemory:
        """Reports the limit to all stages, even if it applies to one."""
        total = int(min(self._room.limit, 1e15))
        return DeviceMemory(total, max(total - self._room.used, 0))


def _settle() -> None:
    """Free released memory: the device keeps it until the host has waited."""
    gc.collect()
    torch.cuda.synchronize()


def offload_all(handle: PipelineHandle) -> None:
    for name in handle.store.loaded():
        handle.store.offload_to_cpu(name)
    _settle()


def result_and_peak(room: Room, handle: PipelineHandle, run: Callable[[], Any]) -> tuple[Any, int]:
    """(result, peak bytes) of a run without a limit."""
    offload_all(handle)
    room.reset_peak()
    made = run()
    most = room.peak
    offload_all(handle)
    return made, most


def fallbacks(report: Any) -> list[str]:
    """Fallbacks that the run took after memory ran out."""
    return [note.rpartition(" back to ")[2] for note in report.notes if "out of memory" in note]


def auto_modes(report: Any) -> list[str]:
    """Modes that offload `auto` chose."""
    return [note.partition("chose ")[2].partition(":")[0] for note in report.notes if "offload auto chose" in note]
