"""What runs in a worker's process under Ray: one job after another, with what is loaded and compiled kept for the next.

Ray pickles what goes between this and the process of the command. Both are the user's own; nothing of a file of jobs is
unpickled but as plain data that passed the gates.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...hosts.local import run_local
from ...hosts.result import RunResult
from ...workflow.graph import Graph
from ..content import version_that_matters
from ..jobs import Job
from ..outputs import Outputs
from ..work import Done, Failed, Lost, Outcome, Refused, perform
from .holding import Holding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What a worker is told when it begins. All paths are absolute, and the same on every machine."""

    models: tuple[Path, ...]
    input_dir: Path
    output_dir: Path
    token: str  # of the output folder, by which a worker sees that it is the command's
    hold: int  # models
    timeout: float | None  # seconds for one job
    run: Callable[..., RunResult] = run_local


@dataclass(frozen=True)
class Hello:
    """A worker that is ready."""

    name: str
    node: str
    trouble: str = ""  # why it is of no use


@dataclass(frozen=True)
class Code:
    """Compiled code on its way to other machines."""

    name: str  # of its target's folder
    data: bytes  # of its file


class Actor:
    """One GPU's process, or one of a CPU."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._holding = Holding(setup.hold)
        self._outputs = Outputs(setup.output_dir)
        self._name = f"{socket.gethostname()}:{os.getpid()}"

    def hello(self, version: str) -> Hello:
        """version: of this pack, where the command runs."""
        import ray

        return Hello(self._name, ray.get_runtime_context().get_node_id(), self._trouble(version))

    def run(self, job: Job, *codes: Code) -> Outcome:
        """Do a job, with what other workers compiled at hand."""
        for code in codes:
            self._take_in(code)
        started, landing = time.time(), self._holding.make_room(job.warmth)
        outcome = perform(job, self._outputs, partial(self._run, job), self._name, landing)
        if isinstance(outcome, Failed):
            self._holding.forget()
            if broken := _broken_device():
                return Lost(f"{outcome.error} {broken}")
        if isinstance(outcome, (Done, Failed, Refused)):
            outcome = replace(outcome, warm=self._holding.warm)
        if isinstance(outcome, Done) and outcome.graphs:
            return replace(outcome, code=_written_since(started))
        return outcome

    def code(self, name: str) -> Code:
        """Compiled code, for other machines."""
        from ....pipelines.compile.cache import SAVED

        return Code(name, (_compiled_directory() / Path(name).name / SAVED).read_bytes())

    def _run(self, job: Job, graph: Graph, output_dir: Path) -> RunResult:
        setup = self._setup
        result = setup.run(
            graph, models=setup.models, input_dir=setup.input_dir, output_dir=output_dir, timeout=setup.timeout
        )
        self._holding.keep(job.warmth, result)
        return result

    def _trouble(self, version: str) -> str:
        if (ours := version_that_matters()) != version:
            return f"it has comfyui-onediff-guard {ours or 'of no version'}, and the command {version or 'of none'}"
        if not (self._setup.output_dir / self._setup.token).exists():
            return (
                f"it does not see the folder {self._setup.output_dir}: --out has to be a folder that all machines share"
            )
        if lacking := [str(models) for models in self._setup.models if not models.is_dir()]:
            return f"it has no folder {', '.join(lacking)}: models have to be there on every machine"
        return ""

    def _take_in(self, code: Code) -> None:
        from ....pipelines.compile.cache import keep_imported
        from ....pipelines.compile.code import parse
        from ....pipelines.errors import BadCompiled

        try:
            keep_imported(_compiled_directory(), *parse(code.data, code.name))
        except (BadCompiled, OSError) as error:
            logger.warning("compiled code from another machine is not used: %s", error)


def _broken_device() -> str:
    """Why this process can compute nothing more, where a kernel's fault has ended CUDA in it; else ""."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"The GPU is of no more use to this process ({error})."
    return ""


def _written_since(started: float) -> str:
    """The name of the folder of compiled code that a run added to last, where that was since then."""
    from ....pipelines.compile.cache import SAVED, kept_folders
    from ....trust.atomic_files import last_used

    written = {last_used(folder / SAVED): folder.name for folder in kept_folders(_compiled_directory())}
    latest = max(written, default=0.0)
    return written[latest] if latest >= started else ""


def _compiled_directory() -> Path:
    from ....comfyui_host.host import compiled_directory

    return compiled_directory()
