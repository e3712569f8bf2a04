"""What a batch asks of those that run its jobs, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from .execution import Outcome
from .jobs import Job


@dataclass(frozen=True)
class Ready:
    """A worker can be given jobs, unless there is a reason why not."""

    name: str
    trouble: str = ""


class Worker(Protocol):
    """Runs one job at a time."""

    name: str

    def connect(self) -> Future[Ready]:
        """Wait until it can be given jobs: at the beginning, and after it died or was unavailable."""
        ...

    def run(self, job: Job) -> Future[Outcome]:
        """An exception in the future means that the worker died."""
        ...


class WorkerPool(Protocol):
    hint: str  # for the error that no worker can be used

    def new_workers(self) -> Sequence[Worker]:
        """The workers that have come since the last call. Asked every second or so."""
        ...
