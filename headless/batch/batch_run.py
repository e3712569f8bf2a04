"""A batch: jobs go from the queue to free workers, and are tried again, or parked, where that fails.

All that it knows beyond the queue is in the folder of outputs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

from ...trust.text import for_terminal
from ..errors import HostError, OutputError
from .claims import Claims
from .execution import CannotWrite, Done, Failed, Outcome, Refused, WorkerDied, WorkerUnavailable
from .job_queue import JobQueue
from .jobs import Job
from .outputs import MAX_ERROR, RUNNING, Outputs, Parked
from .stats import BatchStats
from .worker_pool import Ready, Worker, WorkerPool

LOOK_SECONDS = 1.0  # between two looks for new workers, and at what another batch computes
WAIT_SECONDS = 30.0  # without any worker, after which that is said
MAX_REFUSALS = 8  # of one job by workers, before it is parked


@dataclass
class BatchRun:
    queue: JobQueue
    pool: WorkerPool
    outputs: Outputs
    stats: BatchStats
    attempts: int = 3  # that end with their worker, before a job is parked
    _calls: dict[Future[Any], tuple[Worker, Job | None]] = field(default_factory=dict)  # None: it connects
    _ended: SimpleQueue[Future[Any]] = field(default_factory=SimpleQueue)
    _idle: list[Worker] = field(default_factory=list)
    _disabled: list[str] = field(default_factory=list)  # workers, and why
    _elsewhere: list[Job] = field(default_factory=list)  # that another batch computes
    _heard: float = 0.0  # when a call ended, or its silence was told

    @cached_property
    def claims(self) -> Claims:
        return Claims(self.outputs.folder / RUNNING)

    def run(self) -> None:
        """Until no job is left.

        Raises:
            OutputError: nothing can be written.
            HostError: no worker is left.
        """
        self.outputs.ensure()
        self._heard = time.monotonic()
        try:
            while self.queue.fill() or self._running() or self._elsewhere:
                for worker in self.pool.new_workers():
                    self._call(worker, None, worker.connect())
                self._hand_out()
                if not (self._calls or self._idle):
                    why = "; ".join(self._disabled[:3])
                    raise HostError(f"No worker is left to run jobs on. {why}.{self.pool.hint}")
                self._wait()
        finally:
            self.claims.release_all()

    def _running(self) -> list[Job]:
        return [job for _, job in self._calls.values() if job is not None]

    def _wait(self) -> None:
        """For a call to end, or until it is time for another look."""
        try:
            call = self._ended.get(timeout=LOOK_SECONDS)
        except Empty:
            self._look()
            return
        self._heard = time.monotonic()
        worker, job = self._calls.pop(call)
        try:
            result = call.result()
        except Exception as error:  # noqa: BLE001 - of Ray's kinds: the process ended
            result = WorkerDied(_in_one_line(error))
        if job is None:
            self._connected(worker, result)
        else:
            self._finished(worker, job, result)

    def _call(self, worker: Worker, job: Job | None, future: Future[Any]) -> None:
        self._calls[future] = worker, job
        future.add_done_callback(self._ended.put)

    def _connected(self, worker: Worker, result: Ready | WorkerDied) -> None:
        trouble = result.reason if isinstance(result, WorkerDied) else result.trouble
        if isinstance(result, Ready):
            worker.name = result.name
        if trouble:
            self._disabled.append(f"{worker.name}: {trouble}")
            self.stats.say(f"worker {worker.name} disabled: {trouble}")
            self._park_refused(self._workers())
        else:
            self._idle.append(worker)

    def _workers(self) -> list[Worker]:
        return [*self._idle, *(worker for worker, _ in self._calls.values())]

    def _hand_out(self) -> None:
        for worker in [*self._idle]:
            while (job := self.queue.take(worker.name)) and not self._claimed(job):
                ...
            if job:
                self._idle.remove(worker)
                self._call(worker, job, worker.run(job))

    def _claimed(self, job: Job) -> bool:
        """Claim a job for this batch, unless another has it, or has done it meanwhile."""
        with self.outputs.errors_told():
            mine = self.claims.take(job.content)
        if not mine:
            self._elsewhere.append(job)
        elif self.queue.skip(job):
            self._close(job)
            mine = False
        return mine

    def _close(self, job: Job) -> None:
        self.queue.close(job)
        self.claims.release(job.content)

    def _finished(self, worker: Worker, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, (WorkerDied, WorkerUnavailable)):
            self._call(worker, None, worker.connect())
        else:
            self._idle.append(worker)
        if isinstance(outcome, Done):
            self.outputs.unpark(job.content)
            self.stats.finished(job, worker.name, outcome)
            self._close(job)
        elif isinstance(outcome, Failed):
            self._park(job, outcome.error, job.attempts + 1)
        elif isinstance(outcome, CannotWrite):
            raise OutputError(outcome.error)
        elif isinstance(outcome, Refused):
            self._again(replace(job, refusals={**job.refusals, worker.name: outcome.error}))
            if not self._park_refused(self._workers()):
                self.stats.say(f"{worker.name} does not take {job.name}: {' '.join(outcome.error.split())}")
        elif isinstance(outcome, WorkerUnavailable):
            self._again(job)
            self.stats.say(f"{worker.name} is away: {outcome.reason}")
        else:
            self._died(worker, replace(job, attempts=job.attempts + 1), outcome.reason)

    def _again(self, job: Job) -> None:
        self.claims.release(job.content)
        self.queue.put_back(job)

    def _died(self, worker: Worker, job: Job, reason: str) -> None:
        again = job.attempts < self.attempts
        self.stats.worker_died(job, worker.name, reason, again=again)
        if again:
            self._again(job)
        else:
            times = "once" if job.attempts == 1 else f"{job.attempts} times"
            self._park(job, f"It ended its worker {times}, at last so: {reason}", job.attempts)

    def _park_refused(self, workers: Collection[Worker]) -> int:
        """Park the jobs that none of these workers takes; how many these were."""
        names = {worker.name for worker in workers}
        refused = self.queue.take_where(
            lambda job: bool(job.refusals) and (len(job.refusals) >= MAX_REFUSALS or names <= job.refusals.keys())
        )
        for job in refused:
            self._park(job, [*job.refusals.values()][-1], len(job.refusals))
        return len(refused)

    def _park(self, job: Job, error: str, attempts: int) -> None:
        name, error = for_terminal(job.name), for_terminal(error)  # half a character cannot be written
        self.outputs.park(Parked(content=job.content, name=name[:400], error=error[:MAX_ERROR], attempts=attempts))
        self.stats.failed_job(job, error)
        self._close(job)

    def _look(self) -> None:
        for job in self._elsewhere:
            self.queue.put_back(job)
        self._elsewhere.clear()
        if self._running() or time.monotonic() - self._heard < WAIT_SECONDS:
            return
        self._heard = time.monotonic()
        if self._park_refused(self._idle):  # whoever else might take them does not come
            return
        if self._idle:
            self.stats.say("Waiting for jobs that another batch computes into this folder.")
        else:
            self.stats.say("Waiting for a worker: none is ready. Are all GPUs of the cluster taken?")


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:1000] or type(error).__name__
