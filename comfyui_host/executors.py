"""What computes in one run. On several GPUs ComfyUI has a copy of the network on each, and a thread for each, which
compute guidance halves at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from ..precision.report import StepRecord

Made = TypeVar("Made")


class PerExecutor(Generic[Made]):
    """One of something for each network and thread that computes with it."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.nn.Module, int], Made] = {}
        self._lock = threading.Lock()

    def of(self, network: torch.nn.Module, make: Callable[[], Made]) -> Made:
        """This thread's one for a network; made where there is none yet."""
        executor = network, threading.get_ident()
        with self._lock:
            if executor not in self._made:
                self._made[executor] = make()
            return self._made[executor]

    def replace(self, network: torch.nn.Module, made: Made) -> Made:
        """Put another one in the place of this thread's, and return it."""
        with self._lock:
            self._made[network, threading.get_ident()] = made
            return made

    def all(self) -> list[Made]:
        """All of them, in the order in which they began."""
        with self._lock:
            return [*self._made.values()]


class CallLog:
    """The calls of all executors, in the order in which they ended."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._lock = threading.Lock()

    def add(self, record: StepRecord) -> StepRecord:
        """record: as its executor counts. Returns it as the run does."""
        with self._lock:
            counted = replace(record, step=len(self.steps))
            self.steps.append(counted)
            return counted
