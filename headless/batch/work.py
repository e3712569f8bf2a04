"""One job done: run by a host into a folder that takes its place once it is whole. The same for all kinds of worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import HeadlessError, HostError, InterruptedRunError, OutputError, ServerLostError, WorkflowError
from ..hosts.result import RunResult
from .affinity import Landing, Warmth
from .jobs import Job
from .outputs import Outputs

Run = Callable[..., RunResult]  # as `run_local`: (graph, output_dir=, timeout=)


@dataclass(frozen=True)
class Done:
    """A job's outputs are in their place."""

    seconds: float  # of the run
    graphs: int = 0  # that it compiled anew
    landing: Landing = Landing.COLD
    warm: tuple[Warmth, ...] = ()  # for what its worker is warm now
    code: str = ""  # name of the folder of compiled code that the run added to


@dataclass(frozen=True)
class Failed:
    """A job has none, and by its own fault: it would fail again."""

    error: str
    warm: tuple[Warmth, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A worker does not take a job, since it lacks a node or a model; nothing ran. Another one may have it."""

    error: str
    warm: tuple[Warmth, ...] = ()


@dataclass(frozen=True)
class Lost:
    """A job's worker ended in the middle of it, or is of no more use."""

    reason: str


@dataclass(frozen=True)
class Away:
    """A job's worker could not be reached: nothing ran."""

    reason: str


@dataclass(frozen=True)
class Stopped:
    """Nothing can go on: the outputs cannot be written."""

    error: str


Outcome = Done | Failed | Refused | Lost | Away | Stopped


def perform(job: Job, outputs: Outputs, run: Run, where: str, landing: Landing) -> Outcome:
    """Run a job, unless its outputs are there. where: what its record calls the worker."""
    if outputs.has(job.content):
        return Done(0.0, landing=landing)
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
                "worker": where,
                "landed": landing.value,
                "graphs_compiled": graphs,
                "attempts": job.attempts + 1,
            }
    except OutputError as error:
        return Stopped(str(error))
    except (ServerLostError, InterruptedRunError) as error:  # a node may interrupt its own run, each time
        return Lost(str(error))
    except HostError as error:
        return Away(str(error))
    except WorkflowError as error:
        return Refused(str(error))
    except HeadlessError as error:
        return Failed(str(error))
    return Done(result.seconds, graphs, landing)


def compiled_anew(result: RunResult) -> int:
    """The graphs that a run compiled, without those whose code an earlier process had compiled."""
    stages = result.stages()
    return sum(max((stage.get("graphs") or 0) - (stage.get("graphs_kept") or 0), 0) for stage in stages)
