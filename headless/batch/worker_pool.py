"""The interface of a batch's workers, and the run of one job, which is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from ..errors import (
    ForeignFileError,
    HeadlessError,
    HostError,
    InterruptedRunError,
    OutputError,
    ServerLostError,
    WorkflowError,
)
from ..hosts.result import RunResult
from .content import check_unchanged
from .jobs import Job
from .outputs import Outputs

Run = Callable[..., RunResult]  # as `run_local`: (graph, output_dir=)


class End(Enum):
    DONE = "the outputs are in their place"
    FAILED = "by the job's own fault: it would again"
    REFUSED = "the worker lacks a node or a model; nothing ran, and another may have it"
    DIED = "the worker ended in the middle of the job"
    AWAY = "the worker could not be reached; nothing ran"
    UNWRITABLE = "the outputs cannot be written, of this job or of any other"


ENDS: tuple[tuple[type[HeadlessError], End], ...] = (  # the first matching class counts
    (ForeignFileError, End.FAILED),
    (OutputError, End.UNWRITABLE),
    (ServerLostError, End.DIED),
    (InterruptedRunError, End.DIED),  # a node may interrupt its own run every time
    (HostError, End.AWAY),
    (WorkflowError, End.REFUSED),
    (HeadlessError, End.FAILED),
)


@dataclass(frozen=True)
class JobOutcome:
    end: End
    error: str = ""
    seconds: float = 0.0  # of the run


class Ready(NamedTuple):
    """A worker is ready for jobs, unless it reports a problem."""

    name: str
    trouble: str = ""


class Worker(Protocol):
    """Runs one job at a time. An exception in a future means that it died."""

    name: str

    def connect(self) -> Future[Ready]: ...  # done when it is ready: at first, and after it died or was unreachable

    def run(self, job: Job) -> Future[JobOutcome]: ...


class WorkerPool(Protocol):
    def new_workers(self) -> Sequence[Worker]: ...  # since the last call; called about every second


def execute(job: Job, outputs: Outputs, run: Run, worker: str) -> JobOutcome:
    """Run a job, unless its outputs exist. worker: its name, for the job's record."""
    if outputs.has(job.content):
        return JobOutcome(End.DONE)
    try:
        with outputs.arriving(job.content) as (folder, record):
            check_unchanged(job.images)
            result = run(job.graph, output_dir=folder)
            check_unchanged(job.images)
            record |= {
                "name": job.name,
                "content": job.content,
                "workflow": job.graph.to_api(),
                "files": [file.relative_to(folder).as_posix() for file in result.files],
                "summaries": result.summaries(),
                "seconds": round(result.seconds, 3),
                "worker": worker,
                "attempts": job.attempts + 1,
            }
    except HeadlessError as error:
        return JobOutcome(next(end for kind, end in ENDS if isinstance(error, kind)), str(error))
    return JobOutcome(End.DONE, seconds=result.seconds)
