"""A batch run: jobs are read, sorted and given to free workers; failed ones are retried or parked.

Apart from the queue of waiting jobs, all state is in the output folder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, TextIO

from ...pipelines.time_left import in_words
from ...trust.message import for_terminal
from ..errors import HostError, OutputError
from .jobs import Job, Unmade
from .outputs import Outputs
from .worker_pool import End, JobOutcome, Ready, Worker, WorkerPool

CHUNK = 1024  # jobs that are sorted together, about 10 KB each
LOOK_SECONDS = 1.0  # between two checks for new workers, and for results of another batch
WAIT_SECONDS = 30.0  # without any worker, before a message says so
LISTED = 1000  # most parked jobs that the result names; the folder has all
ENDED = "its process ended. Main memory may have run out, or a library crashed: see the system's log"
MAX_ERROR = 4000  # most characters of an error that are kept


@dataclass
class BatchStats:
    """Progress and results of a batch: counts, and a line at each job's end."""

    jobs: int
    stream: TextIO
    now: Callable[[], float] = time.monotonic
    done: int = 0
    already_done: int = 0  # done before this run, or duplicates of done jobs
    failed: int = 0  # parked in this run
    parked_before: int = 0  # parked by an earlier run, or duplicates of failed jobs
    workers_lost: int = 0  # workers that died during a job
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
        self._tell(f"done {job.name} → {job.content}, {seconds:.1f} s on {worker}")

    def failed_job(self, job: Job | Unmade, error: str) -> None:
        self.failed += 1
        self._note(job, error)
        self._tell(f"FAILED {job.name} ({job.content}): {error}")

    def skipped(self, job: Job, error: str = "") -> None:
        """Count a skipped job. error: the reason why it was parked; "": it is done."""
        if error:
            self.parked_before += 1
            self._note(job, error)
        else:
            self.already_done += 1

    def worker_died(self, job: Job, worker: str, reason: str, *, again: bool) -> None:
        self.workers_lost += 1
        self._tell(f"{worker} died in {job.name}: {reason}{' The job is retried.' if again else ''}")

    def say(self, line: str) -> None:
        print(" ".join(line.split()), file=self.stream, flush=True)  # errors contain line breaks

    def facts(self) -> dict[str, Any]:
        names = ("jobs", "done", "already_done", "failed", "parked_before", "workers_lost", "seconds", "faults")
        return {name: getattr(self, name) for name in names}

    def summary(self) -> str:
        facts = {name.replace("_", " "): number for name, number in self.facts().items() if isinstance(number, int)}
        told = ", ".join(f"{number:,} {name}" for name, number in facts.items() if number)
        return f"{told or 'no jobs'} in {self.seconds:.1f} s"

    def _note(self, job: Job | Unmade, error: str) -> None:
        if len(self.faults) < LISTED:
            self.faults.append({"name": job.name, "content": job.content, "error": error})

    def _tell(self, what: str) -> None:
        told = [f"[{self.over}/{self.jobs}] {what}"]
        rate, left = (self.done + self.failed) / max(self.seconds, 0.001), self.jobs - self.over
        if rate:
            told.append(f"{rate:.2g}/s" if rate >= 1 else f"{60 * rate:.2g}/min")
        if rate and left:
            told.append(in_words(left / rate))
        if bad := self.failed + self.parked_before:
            told.append(f"{bad} failed")
        self.say(" · ".join(told))


class JobQueue:
    """Jobs that are neither done nor parked, without duplicates, sorted by cache key in chunks.

    retry: include jobs that an earlier run parked.
    """

    def __init__(self, jobs: Iterable[Job | Unmade], outputs: Outputs, stats: BatchStats, *, retry: bool = False):
        self._outputs, self._stats, self._retry = outputs, stats, retry
        self._jobs = self._open_jobs(jobs)
        self._waiting: deque[Job] = deque()
        self._open: dict[str, int] = {}  # content hash of each job that waits or runs → number of its duplicates

    def fill(self) -> bool:
        """Read a chunk if no job waits. Returns whether any waits then."""
        if not self._waiting:
            self._waiting.extend(sorted(islice(self._jobs, CHUNK), key=lambda job: job.cache_key))
        return bool(self._waiting)

    def take(self, suits: Callable[[Job], bool], most: int = CHUNK) -> list[Job]:
        """Those that wait and suit, at most so many."""
        self.fill()
        taken = list(islice(filter(suits, self._waiting), most))
        for job in taken:
            self._waiting.remove(job)
        return taken

    def put_back(self, job: Job) -> None:
        self._waiting.appendleft(job)

    def close(self, job: Job) -> None:
        """Count the duplicates of a job that is over, as done or parked like it."""
        for _ in range(self._open.pop(job.content)):
            self._stats.skipped(job, "" if self._outputs.has(job.content) else self._outputs.parked(job.content))

    def skip(self, job: Job) -> bool:
        """Count a job that is done or parked. Returns whether it is."""
        done = self._outputs.has(job.content)
        parked = "" if done or self._retry else self._outputs.parked(job.content)
        if over := done or bool(parked):
            self._stats.skipped(job, parked)
        return over

    def _open_jobs(self, jobs: Iterable[Job | Unmade]) -> Iterator[Job]:
        for job in jobs:
            if isinstance(job, Unmade):
                self._stats.failed_job(job, job.error)
            elif job.content in self._open:
                self._open[job.content] += 1
            elif not self.skip(job):
                self._open[job.content] = 0
                yield job


@dataclass
class BatchRun:
    queue: JobQueue
    pool: WorkerPool
    outputs: Outputs
    stats: BatchStats
    attempts: int = 3  # attempts that kill their worker, before a job is parked
    _calls: dict[Future[Any], tuple[Worker, Job | None]] = field(default_factory=dict)  # None: the worker is connecting
    _ended: SimpleQueue[Future[Any]] = field(default_factory=SimpleQueue)
    _idle: list[Worker] = field(default_factory=list)
    _disabled: list[str] = field(default_factory=list)  # names of workers, with the reason
    _elsewhere: list[Job] = field(default_factory=list)  # jobs that another batch computes
    _claims: dict[str, BinaryIO] = field(default_factory=dict)  # by content

    def run(self) -> None:
        """Run until no job is left. Raises OutputError if nothing can be written, HostError if no worker is left."""
        self._heard = time.monotonic()  # time of the last ended call or waiting message
        try:
            while self.queue.fill() or self._running() or self._elsewhere:
                for worker in self.pool.new_workers():
                    self._call(worker, None, worker.connect())
                self._hand_out()
                if not (self._calls or self._idle):
                    raise HostError(f"No worker is left to run jobs on. {'; '.join(self._disabled[:3])}.")
                self._wait()
        finally:
            for content in [*self._claims]:
                self._release(content)

    def _running(self) -> bool:
        return any(job for _, job in self._calls.values())

    def _hand_out(self) -> None:
        for worker in [*self._idle]:
            while jobs := self.queue.take(lambda job, name=worker.name: name not in job.refusals, most=1):
                if self._claimed(job := jobs[0]):
                    self._idle.remove(worker)
                    self._call(worker, job, worker.run(job))
                    break

    def _claimed(self, job: Job) -> bool:
        """Claim a job for this batch, unless another batch runs it or has done it meanwhile."""
        claim = self.outputs.claim(job.content)
        if claim is None:
            self._elsewhere.append(job)
            return False
        self._claims[job.content] = claim
        if self.queue.skip(job):
            self._close(job)
            return False
        return True

    def _release(self, content: str) -> None:
        if claim := self._claims.pop(content, None):
            self.outputs.release(content, claim)

    def _call(self, worker: Worker, job: Job | None, future: Future[Any]) -> None:
        self._calls[future] = worker, job
        future.add_done_callback(self._ended.put)

    def _wait(self) -> None:
        """Wait until a call ends, or the next check is due."""
        try:
            call = self._ended.get(timeout=LOOK_SECONDS)
        except Empty:
            self._look()
            return
        self._heard = time.monotonic()
        worker, job = self._calls.pop(call)
        error = call.exception()  # one of Ray's: the process ended
        died = f"{ENDED} ({' '.join(str(error).split())[:1000] or type(error).__name__})" if error else ""
        if job:
            self._finished(worker, job, JobOutcome(End.DIED, died) if died else call.result())
        else:
            self._connected(worker, Ready(worker.name, died) if died else call.result())

    def _connected(self, worker: Worker, ready: Ready) -> None:
        worker.name = ready.name
        if ready.trouble:
            self._disabled.append(f"{worker.name}: {ready.trouble}")
            self.stats.say(f"worker {worker.name} disabled: {ready.trouble}")
            self._park_refused(self._workers())
        else:
            self._idle.append(worker)

    def _finished(self, worker: Worker, job: Job, outcome: JobOutcome) -> None:
        if outcome.end in (End.DIED, End.AWAY):
            self._call(worker, None, worker.connect())
        else:
            self._idle.append(worker)
        if outcome.end is End.DONE:
            self.outputs.unpark(job.content)
            self._close(job)
            self.stats.finished(job, worker.name, outcome.seconds)
        elif outcome.end is End.UNWRITABLE:
            raise OutputError(outcome.error)
        elif outcome.end is End.FAILED:
            self._park(job, outcome.error, job.attempts + 1)
        elif outcome.end is End.REFUSED:
            self._again(replace(job, refusals={**job.refusals, worker.name: outcome.error}))
            if not self._park_refused(self._workers()):
                self.stats.say(f"{worker.name} refuses {job.name}: {outcome.error}")
        elif outcome.end is End.AWAY:
            self._again(job)
            self.stats.say(f"{worker.name} is unreachable: {outcome.error}")
        else:
            job = replace(job, attempts=job.attempts + 1)
            again = job.attempts < self.attempts
            self.stats.worker_died(job, worker.name, outcome.error, again=again)
            if again:
                self._again(job)
            else:
                error = f"Its worker died {job.attempts} times, the last time with: {outcome.error}"
                self._park(job, error, job.attempts)

    def _workers(self) -> list[Worker]:
        return [*self._idle, *(worker for worker, _ in self._calls.values())]

    def _again(self, job: Job) -> None:
        self._release(job.content)
        self.queue.put_back(job)

    def _close(self, job: Job) -> None:
        self.queue.close(job)
        self._release(job.content)

    def _park(self, job: Job, error: str, attempts: int) -> None:
        name, error = for_terminal(job.name), for_terminal(error)[:MAX_ERROR]  # a lone surrogate cannot be written
        self.outputs.park(job.content, name, error or "no reason", attempts)
        self._close(job)
        self.stats.failed_job(job, error)

    def _park_refused(self, workers: list[Worker]) -> bool:
        """Park the jobs that none of these workers accepts. Returns whether there were any."""
        names = {worker.name for worker in workers}
        refused = self.queue.take(lambda job: bool(job.refusals) and names <= job.refusals.keys())
        for job in refused:
            self._park(job, [*job.refusals.values()][-1], len(job.refusals))
        return bool(refused)

    def _look(self) -> None:
        """Run the regular checks: results of another batch, and a message about a long wait."""
        for job in self._elsewhere:
            self.queue.put_back(job)
        self._elsewhere.clear()
        if self._running() or time.monotonic() - self._heard < WAIT_SECONDS:
            return
        self._heard = time.monotonic()
        if self._park_refused(self._idle):  # no other worker comes that might accept them
            return
        what = "jobs that another batch is writing into this folder" if self._idle else "a worker: none is ready"
        self.stats.say(f"Waiting for {what}.")
