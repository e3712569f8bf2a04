"""How far a batch is and what came of it, in numbers and lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from ...pipelines.pace import in_words
from .jobs import Job, Unmade

LISTED = 1000  # parked jobs that the answer names; the folder has all


@dataclass
class BatchStats:
    """Counts, and a line for each job's end."""

    jobs: int
    stream: TextIO
    now: Callable[[], float] = time.monotonic
    done: int = 0
    already_done: int = 0  # before this run, or the same as another of its jobs
    failed: int = 0  # parked in this run
    parked_before: int = 0  # by an earlier one, and left so
    workers_lost: int = 0  # in the middle of a job
    faults: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.now()

    @property
    def over(self) -> int:
        return self.done + self.already_done + self.failed + self.parked_before

    @property
    def seconds(self) -> float:
        return round(self.now() - self._began, 3)

    def finished(self, job: Job, worker: str, seconds: float) -> None:
        self.done += 1
        self._say(f"done {job.name} → {job.content}, {seconds:.1f} s on {worker}")

    def failed_job(self, job: Job | Unmade, error: str) -> None:
        self.failed += 1
        fault = self._note(job, error)
        self._say(f"FAILED {job.name} ({fault['content']}): {error}")

    def skipped(self, job: Job, error: str = "") -> None:
        """error: for which it was parked; "": it is done."""
        if error:
            self.parked_before += 1
            self._note(job, error)
        else:
            self.already_done += 1

    def worker_died(self, job: Job, worker: str, reason: str, *, again: bool) -> None:
        self.workers_lost += 1
        self._say(f"{worker} died in {job.name}: {reason}{' The job is tried again.' if again else ''}")

    def say(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def facts(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        names = ("jobs", "done", "already_done", "failed", "parked_before", "workers_lost", "seconds", "faults")
        return {name: getattr(self, name) for name in names}

    def summary(self) -> str:
        parts = [f"{self.done:,} done in {self.seconds:.1f} s", f"{self.already_done:,} were there"]
        others = (
            (self.failed, "failed"),
            (self.parked_before, "had failed before"),
            (self.workers_lost, "workers lost"),
        )
        parts += [f"{number:,} {what}" for number, what in others if number]
        return f"{self.jobs:,} jobs: {', '.join(parts)}"

    def _note(self, job: Job | Unmade, error: str) -> dict[str, str]:
        fault = {"name": job.name, "content": job.content, "error": error}
        if len(self.faults) < LISTED:
            self.faults.append(fault)
        return fault

    def _say(self, what: str) -> None:
        told = [" ".join(f"[{self.over}/{self.jobs}] {what}".split())]  # errors have lines of their own
        rate, left = (self.done + self.failed) / max(self.seconds, 0.001), self.jobs - self.over
        if rate:
            told.append(f"{rate:.2g}/s" if rate >= 1 else f"{60 * rate:.2g}/min")
        if rate and left:
            told.append(in_words(left / rate))
        if bad := self.failed + self.parked_before:
            told.append(f"{bad} failed")
        self.say(" · ".join(told))
