"""What runs in a worker's process under Ray: one job after another, with the last model kept loaded and compiled.

Ray pickles what goes between this and the process of the command. Both are the user's own; nothing of a file of jobs is
unpickled but as plain data that passed the gates.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..hosts.local import run_local
from ..hosts.result import RunResult
from ..workflow.graph import Graph
from .content import CacheKey, version_that_matters
from .jobs import Job
from .outputs import Outputs
from .worker_pool import End, Outcome, Ready, Run, execute

LATE_SECONDS = 60.0  # beyond --timeout, after which a process is ended whose job did not stop by itself


@dataclass(frozen=True)
class Setup:
    """What a worker is told when it begins. All paths are absolute, and the same on every machine."""

    models: tuple[Path, ...]
    input_dir: Path
    output_dir: Path
    token: str  # of the output folder, by which a worker sees that it is the command's
    timeout: float | None  # seconds for one job
    run: Run = run_local


class RayActor:
    """The process of one GPU, or of a CPU."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._cache = PipelineCache()
        self._outputs = Outputs(setup.output_dir)
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def hello(self, version: str) -> Ready:
        """Say whether this worker can do the command's jobs. version: of this pack, where the command runs."""
        setup, ours, trouble = self._setup, version_that_matters(), ""
        if ours != version:
            trouble = f"it has comfyui-onediff-guard {ours or 'of no version'}, and the command {version or 'of none'}"
        elif not (setup.output_dir / setup.token).exists():
            trouble = f"it does not see the folder {setup.output_dir}: --out has to be a folder that all machines share"
        elif lacking := [str(models) for models in setup.models if not models.is_dir()]:
            trouble = f"it has no folder {', '.join(lacking)}: models have to be there on every machine"
        return Ready(self._name, trouble)

    def run(self, job: Job) -> Outcome:
        setup = self._setup

        def run(graph: Graph, output_dir: Path) -> RunResult:
            folders = {"models": setup.models, "input_dir": setup.input_dir, "output_dir": output_dir}
            result = setup.run(graph, **folders, timeout=setup.timeout)
            self._cache.put(job.cache_key, result)
            return result

        self._cache.evict_for(job.cache_key)
        if setup.timeout:
            faulthandler.dump_traceback_later(setup.timeout + LATE_SECONDS, exit=True)
        outcome = execute(job, self._outputs, run, self._name)
        faulthandler.cancel_dump_traceback_later()
        if outcome.end is End.FAILED:  # and may have left anything
            self._cache.clear()
            if _is_device_broken():
                os._exit(1)  # Ray starts another process
        return outcome


class PipelineCache:
    """The pipelines of the last job, loaded and compiled, for as long as jobs have its model and plan."""

    def __init__(self) -> None:
        self._model: tuple[str, str] | None = None  # and plan
        self._kept: list[Any] = []

    def evict_for(self, key: CacheKey) -> None:
        """Free what the next job cannot use, and needs the memory of."""
        if self._model != (key.model, key.plan):
            self.clear()

    def put(self, key: CacheKey, result: RunResult) -> None:
        """Keep the pipelines that a run loaded."""
        from ...pipelines.run.handle import PipelineHandle

        self._model = key.model, key.plan
        self._kept = [value for made in result.results.values() for value in made if isinstance(value, PipelineHandle)]

    def clear(self) -> None:
        self._model, self._kept = None, []
        gc.collect()  # modules hold reference cycles
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _end_with(parent: int) -> None:
    """End this process, and free its GPU, as soon as Ray's own process on this machine is gone. Ray takes a minute."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _is_device_broken() -> bool:
    """Whether this process can compute nothing more, since a kernel's fault has ended CUDA in it."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
