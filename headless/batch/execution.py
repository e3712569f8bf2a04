"""One job, run into a folder that takes its place once it is whole. The same for all kinds of worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import HeadlessError, HostError, InterruptedRunError, OutputError, ServerLostError, WorkflowError
from ..hosts.result import RunResult
from .jobs import Job
from .outputs import Outputs

Run = Callable[..., RunResult]  # as `run_local`: (graph, output_dir=)


@dataclass(frozen=True)
class Done:
    """The job's outputs are in their place."""

    seconds: float  # of the run
    graphs: int = 0  # compiled anew


@dataclass(frozen=True)
class Failed:
    """The job fails by its own fault, and would again."""

    error: str


@dataclass(frozen=True)
class Refused:
    """The worker lacks a node or a model that the job needs; nothing ran. Another worker may have it."""

    error: str


@dataclass(frozen=True)
class WorkerDied:
    """The worker ended in the middle of the job."""

    reason: str


@dataclass(frozen=True)
class WorkerUnavailable:
    """The worker could not be reached; nothing ran."""

    reason: str


@dataclass(frozen=True)
class CannotWrite:
    """The outputs cannot be written, of this job or of any other."""

    error: str


Outcome = Done | Failed | Refused | WorkerDied | WorkerUnavailable | CannotWrite


def execute(job: Job, outputs: Outputs, run: Run, worker: str) -> Outcome:
    """Run a job, unless its outputs are there. worker: its name, for the job's record."""
    if outputs.has(job.content):
        return Done(0.0)
    try:
        with outputs.arriving(job.content) as made:
            result = run(job.graph, output_dir=made.folder)
            graphs = compiled_anew(result)
            made.record = {
                "name": job.name,
                "content": job.content,
                "workflow": job.graph.to_api(),
                "files": made.names(result.files),
                "summaries": result.summaries(),
                "seconds": round(result.seconds, 3),
                "worker": worker,
                "graphs_compiled": graphs,
                "attempts": job.attempts + 1,
            }
    except OutputError as error:
        return CannotWrite(str(error))
    except (ServerLostError, InterruptedRunError) as error:  # a node may interrupt its own run, each time
        return WorkerDied(str(error))
    except HostError as error:
        return WorkerUnavailable(str(error))
    except WorkflowError as error:
        return Refused(str(error))
    except HeadlessError as error:
        return Failed(str(error))
    return Done(result.seconds, graphs)


def compiled_anew(result: RunResult) -> int:
    """The graphs that a run compiled, without those whose code an earlier process had compiled."""
    stages = result.stages()
    return sum(max((stage.get("graphs") or 0) - (stage.get("graphs_kept") or 0), 0) for stage in stages)
