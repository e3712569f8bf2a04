"""The jobs that wait. They are read and sorted by cache key in chunks, so that a file may have any length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from .jobs import Job, Unmade
from .outputs import Outputs
from .stats import BatchStats

CHUNK = 1024  # jobs that are sorted together; of some 10 KB each


class JobQueue:
    """Jobs that are neither done nor parked, each content once.

    Args:
        jobs: all of them.
        retry: also those that an earlier run parked.
    """

    def __init__(self, jobs: Iterator[Job | Unmade], outputs: Outputs, stats: BatchStats, *, retry: bool = False):
        self._outputs, self._stats, self._retry = outputs, stats, retry
        self._jobs = self._open_jobs(jobs)
        self._waiting: deque[Job] = deque()
        self._open: set[str] = set()  # contents of jobs that wait or run

    def fill(self) -> bool:
        """Read a chunk where none waits; whether any does."""
        if not self._waiting:
            self._waiting.extend(sorted(islice(self._jobs, CHUNK), key=lambda job: job.cache_key))
        return bool(self._waiting)

    def take(self, worker: str) -> Job | None:
        """The next job that a worker of this name has not refused."""
        self.fill()
        return next(iter(self.take_where(lambda job: worker not in job.refusals, most=1)), None)

    def take_where(self, suits: Callable[[Job], bool], most: int = CHUNK) -> list[Job]:
        """Those that wait and suit, at most so many."""
        taken = list(islice((job for job in self._waiting if suits(job)), most))
        for job in taken:
            self._waiting.remove(job)
        return taken

    def put_back(self, job: Job) -> None:
        """Have a job wait before all others."""
        self._waiting.appendleft(job)

    def close(self, job: Job) -> None:
        """The job is over."""
        self._open.discard(job.content)

    def skip(self, job: Job) -> bool:
        """Count a job that is done, or parked, and say whether it is."""
        parked = None if self._retry else self._outputs.parked(job.content)
        over = self._outputs.has(job.content)
        if over or parked:
            self._stats.skipped(job, "" if over or not parked else parked.error)
        return over or parked is not None

    def _open_jobs(self, jobs: Iterator[Job | Unmade]) -> Iterator[Job]:
        for job in jobs:
            if isinstance(job, Unmade):
                self._stats.failed_job(job, job.error)
            elif job.content in self._open:
                self._stats.skipped(job, "")
            elif not self.skip(job):
                self._open.add(job.content)
                yield job
