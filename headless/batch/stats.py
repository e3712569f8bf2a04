"""How far a batch is and what came of it, in numbers and lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from ...pipelines.pace import in_words
from .execution import Done
from .jobs import Job, Unmade

LISTED = 1000  # parked jobs that the answer names; the folder has all
LATEST = 100  # jobs whose ends tell the rate


@dataclass
class BatchStats:
    """Counts, and a line for each job's end."""

    total: int
    stream: TextIO
    now: Callable[[], float] = time.monotonic
    done: int = 0
    there: int = 0  # before this run, or the same as another of its jobs
    failed: int = 0  # parked in this run
    parked: int = 0  # by an earlier one, and left so
    lost: int = 0  # workers in the middle of a job
    graphs: int = 0  # compiled anew
    seconds: float = 0.0  # of all jobs together
    faults: list[dict[str, Any]] = field(default_factory=list)
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    _began: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.now()
        self._ends.append(self._began)

    @property
    def over(self) -> int:
        return self.done + self.there + self.failed + self.parked

    @property
    def elapsed(self) -> float:
        return self.now() - self._began

    def finished(self, job: Job, worker: str, outcome: Done) -> None:
        self.done += 1
        self.graphs += outcome.graphs
        self.seconds += outcome.seconds
        self._ends.append(self.now())
        self._say(f"done {job.name} → {job.content}, {outcome.seconds:.1f} s on {worker}")

    def failed_job(self, job: Job | Unmade, error: str) -> None:
        self.failed += 1
        self._note(job, error)
        self._ends.append(self.now())
        self._say(f"FAILED {job.name} ({_content(job)}): {error}")

    def skipped(self, job: Job, error: str) -> None:
        """error: for which it was parked; "": it is done."""
        if not error:
            self.there += 1
            return
        self.parked += 1
        self._note(job, error)

    def worker_died(self, job: Job, worker: str, reason: str, *, again: bool) -> None:
        self.lost += 1
        self._say(f"{worker} died in {job.name}: {reason} {'The job is tried again.' if again else ''}".rstrip())

    def say(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def rate(self) -> float:
        """Jobs a second, of late; 0 while that is not known."""
        first, last = self._ends[0], self._ends[-1]
        return (len(self._ends) - 1) / (last - first) if last > first else 0.0

    def facts(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "jobs": self.total,
            "done": self.done,
            "already_done": self.there,
            "failed": self.failed,
            "parked_before": self.parked,
            "workers_lost": self.lost,
            "seconds": round(self.elapsed, 3),
            "job_seconds": round(self.seconds, 3),
            "graphs_compiled": self.graphs,
            "faults": self.faults,
        }

    def summary(self) -> str:
        parts = [f"{self.done:,} done in {self.elapsed:.1f} s", f"{self.there:,} were there"]
        parts += [f"{self.failed:,} failed"] if self.failed else []
        parts += [f"{self.parked:,} had failed before"] if self.parked else []
        parts += [f"{self.lost:,} workers lost"] if self.lost else []
        return f"{self.total:,} jobs: {', '.join(parts)}"

    def _note(self, job: Job | Unmade, error: str) -> None:
        if len(self.faults) < LISTED:
            self.faults.append({"name": job.name, "content": _content(job), "error": error})

    def _say(self, what: str) -> None:
        what = " ".join(what.split())  # errors have lines of their own
        rate, left = self.rate(), self.total - self.over
        pace = f"{rate:.2g}/s" if rate >= 1 else f"{60 * rate:.2g}/min"
        told = [pace, in_words(left / rate)] if rate and left else [pace] if rate else []
        told += [f"{self.failed + self.parked} failed"] if self.failed + self.parked else []
        self.say(
            f"[{self.over}/{self.total}] {what} · {', '.join(told)}" if told else f"[{self.over}/{self.total}] {what}"
        )


def _content(job: Job | Unmade) -> str:
    return job.content if isinstance(job, Job) else "no job"
