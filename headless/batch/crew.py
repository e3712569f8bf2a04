"""Those that do a batch's jobs: what the course of a batch asks of them, whatever they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from .affinity import Warmth
from .jobs import Job
from .work import Outcome


class Event(NamedTuple):
    """Something came of a worker."""

    worker: Worker
    job: Job | None = None  # None: it is ready for its first
    outcome: Outcome | None = None


class Worker(Protocol):
    """One at a time does one job."""

    name: str
    ready: bool
    warm: Collection[Warmth]  # for these

    def start(self, job: Job) -> None:
        """Begin a job. Its end comes as an event."""
        ...

    def renew(self) -> None:
        """Put a fresh one in its place; an event tells when that is ready. Nothing that was warm is."""
        ...

    def end(self) -> None:
        """End it in the middle of its job, which comes as lost."""
        ...


class Crew(Protocol):
    """All workers of a batch."""

    events: SimpleQueue[Event]

    @property
    def workers(self) -> Sequence[Worker]: ...

    def grow(self) -> None:
        """Take in workers that were not there before. Asked every second or so."""
        ...
