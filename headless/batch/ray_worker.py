"""What runs in a worker's process under Ray: one job after another, with loaded and compiled pipelines kept.

Ray pickles what goes between this and the process of the command. Both are the user's own; nothing of a file of jobs is
unpickled but as plain data that passed the gates.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..hosts.local import run_local
from ..hosts.result import RunResult
from ..workflow.graph import Graph
from .content import version_that_matters
from .execution import Failed, Outcome, WorkerDied, execute
from .jobs import Job
from .outputs import Outputs
from .pipeline_cache import PipelineCache
from .worker_pool import Ready

LATE_SECONDS = 60.0  # beyond --timeout, after which a process is ended whose job did not stop by itself


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


class RayActor:
    """The process of one GPU, or of a CPU."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._cache = PipelineCache(setup.hold)
        self._outputs = Outputs(setup.output_dir)
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def hello(self, version: str) -> Ready:
        """version: of this pack, where the command runs."""
        return Ready(self._name, self._trouble(version))

    def run(self, job: Job) -> Outcome:
        self._cache.evict_for(job.cache_key)
        if self._setup.timeout:
            faulthandler.dump_traceback_later(self._setup.timeout + LATE_SECONDS, exit=True)
        outcome = execute(job, self._outputs, self._run(job), self._name)
        faulthandler.cancel_dump_traceback_later()
        if isinstance(outcome, Failed):
            self._cache.clear()
            if broken := _broken_device():
                return WorkerDied(f"{outcome.error} {broken}")
        return outcome

    def _run(self, job: Job) -> Callable[..., RunResult]:
        setup = self._setup

        def run(graph: Graph, output_dir: Path) -> RunResult:
            folders = {"models": setup.models, "input_dir": setup.input_dir, "output_dir": output_dir}
            result = setup.run(graph, **folders, timeout=setup.timeout)
            self._cache.put(job.cache_key, result)
            return result

        return run

    def _trouble(self, version: str) -> str:
        """Why this worker cannot do the command's jobs, or ""."""
        if (ours := version_that_matters()) != version:
            return f"it has comfyui-onediff-guard {ours or 'of no version'}, and the command {version or 'of none'}"
        if not (self._setup.output_dir / self._setup.token).exists():
            return (
                f"it does not see the folder {self._setup.output_dir}: --out has to be a folder that all machines share"
            )
        if lacking := [str(models) for models in self._setup.models if not models.is_dir()]:
            return f"it has no folder {', '.join(lacking)}: models have to be there on every machine"
        return ""


def _end_with(parent: int) -> None:
    """End this process, and free its GPU, as soon as Ray's own process on this machine is gone. Ray takes a minute."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _broken_device() -> str:
    """Why this process can compute nothing more, where a kernel's fault has ended CUDA in it; else ""."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"The GPU cannot be used by this process any more ({error})."
    return ""
