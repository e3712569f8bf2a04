"""Ray actors as workers, one per GPU: the pool, on the command's side, and the actor, which runs one job after another.
Ray starts, places and restarts the processes.

Ray pickles the data between them. Both sides are the user's own; of a file of jobs, only validated plain data is
pickled.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import re
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...trust.message import shown
from ..errors import HostError, WorkflowError
from ..hosts.local import run_local
from ..hosts.result import RunResult
from ..workflow.graph import Graph
from .content import version_that_matters
from .jobs import Job
from .outputs import Outputs
from .worker_pool import End, JobOutcome, Ready, Run, execute

INSTALL = 'pip install "comfyui-onediff-guard[scale]", or in a clone: pip install ".[scale]"'
STORE_BYTES = 80 * 2**20  # object store of a Ray that is started here; no large data goes through it
NO_TOKEN = " If this machine has a token but the cluster uses none, set RAY_AUTH_MODE=disabled."
CONNECT_SECONDS = 10.0
COUNT_SECONDS = 5.0  # between two counts of the GPUs
LATE_SECONDS = 60.0  # after --timeout, before the process of a job that did not stop is killed

# Variables that Ray reads when it is imported and when it starts
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray binds its ports to this machine only
NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray would send usage statistics
FEW_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # instead of 20 attempts to reach a cluster, of about 30 s each
NO_METRICS = {"RAY_enable_metrics_collection": "0"}  # they keep 3 KB per job name for ever


def require() -> None:
    """Raise WorkflowError if Ray is not installed, without importing it: the import reads variables."""
    if find_spec("ray") is None:
        raise WorkflowError(
            f"'batch' runs jobs with Ray, which is not installed here. Install it: {INSTALL}. Or use running ComfyUIs "
            "with --server URL, without Ray."
        )


@contextmanager
def connected(address: str | None, workers: int | None = None, *, verbose: bool = False) -> Generator[Any]:
    """Connect to Ray; at the end, disconnect or stop it. Its messages go to standard error or are dropped: standard
    output belongs to the command.

    address: of a cluster; None starts a Ray here. Raises WorkflowError if it is no address, HostError if Ray does not
    answer there, or does not start.
    """
    if address and not re.fullmatch(r"auto|[^/]+:[0-9]{1,5}", address):
        raise WorkflowError(
            f"--ray {shown(address)}: expected HOST:PORT as `ray start` prints it, for example 10.0.0.1:6379, or auto."
        )
    own: dict[str, Any] = {"address": address}
    if address:
        os.environ.update(FEW_TRIES | NO_METRICS)
        # A token that is here is shown to a cluster by Ray itself from 2.61 on only, if nothing else was said.
        file = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
        if os.environ.get(TOKEN) or file.is_file():
            os.environ.setdefault(MODE, "token")
        if not os.environ.get(TOKEN) and os.name == "posix" and file.is_file():
            _close(file)
        _check_answers(address)
    else:
        os.environ.update(LOOPBACK | NO_STATISTICS | NO_METRICS)
        os.environ.setdefault(MODE, "token")
        os.environ[TOKEN] = secrets.token_hex(32)  # only for this Ray: nobody else can connect
        cpus = max(workers or 1, os.cpu_count() or 1)
        own = {"address": "local", "num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(sys.stderr if verbose else nowhere):
        ray: Any = import_module("ray")
        sigterm = signal.getsignal(signal.SIGTERM)
        level = logging.INFO if verbose else logging.ERROR
        try:
            ray.init(**own, namespace="onediff-guard", log_to_driver=verbose, logging_level=level)
        except BaseException as error:  # its own errors, those of its dependencies, and signals
            ray.shutdown()
            if isinstance(error, SystemExit):  # Ray's response to SIGTERM
                raise KeyboardInterrupt from None
            if not isinstance(error, Exception):
                raise
            raise HostError(
                f"No Ray {f'answers at {address}' if address else 'starts here'} ({type(error).__name__}: {error}). "
                "Check the address, and that all machines have the same Ray, Python and ~/.ray/auth_token; or leave "
                "out --ray to start one here."
            ) from error
        with suppress(ValueError):  # not the main thread: Ray leaves the signal alone there
            signal.signal(signal.SIGTERM, sigterm)  # Ray has replaced the handler
        try:
            yield ray
        except HostError as error:
            raise HostError(f"{error}{NO_TOKEN if address and os.environ.get(MODE) == 'token' else ''}") from error
        finally:
            with suppress(Exception):  # a cluster that is gone
                ray.shutdown()


def _close(token: Path) -> None:
    """Remove other users' access to a cluster's token: whoever reads it can run code as this user.

    Raises HostError if the token or its folder belongs to another user, or is accessible and cannot be restricted.
    """
    try:
        for path, rights in ((token.parent, 0o022), (token, 0o077)):
            found = path.stat()
            if found.st_uid not in (os.geteuid(), *((0,) if path is token.parent else ())):
                raise PermissionError(None, f"{path} belongs to another user")
            if found.st_mode & rights and not found.st_mode & stat.S_ISVTX:
                path.chmod(found.st_mode & 0o777 & ~rights)
    except OSError as error:
        raise HostError(
            f"Ray's token {token} is not private, and its permissions cannot be changed: {error.strerror or error}. "
            f"Others could connect to Ray and run code as you. Delete it, or set {TOKEN_PATH} to a file of your own, "
            f"or {TOKEN} to the token."
        ) from error


def _check_answers(address: str) -> None:
    """Raise HostError if nothing listens: Ray itself would try for most of a minute."""
    host, _, port = address.rpartition(":")
    if not host:  # auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise HostError(
            f"No Ray answers at {address} ({getattr(error, 'strerror', None) or error}). Start one there with `ray "
            "start --head`, check the address, or leave out --ray to start one here."
        ) from error


@dataclass(frozen=True)
class Setup:
    """A worker's configuration. All paths are absolute, and the same on every machine."""

    models: tuple[Path, ...]
    input_dir: Path
    output_dir: Path
    token: str  # of the output folder: a worker that sees it has the same folder
    timeout: float | None  # seconds per job
    run: Run = run_local


class RayPool:
    """The workers of a cluster."""

    def __init__(self, ray: Any, setup: Setup, workers: int | None) -> None:
        self._ray, self._setup, self._fixed = ray, setup, workers
        self._workers: list[RayWorker] = []
        self._count_at = 0.0  # time of the next count of the cluster's GPUs

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            with suppress(Exception):  # the actor or the cluster is gone
                self._ray.kill(worker.actor)

    def new_workers(self) -> list[RayWorker]:
        """Return new workers: at first the requested number, or one per GPU, or one; later one for each new GPU."""
        if self._workers and (self._fixed or time.monotonic() < self._count_at):
            return []
        self._count_at = time.monotonic() + COUNT_SECONDS
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
        make = self._ray.remote(RayActor).options(max_restarts=-1, max_task_retries=-1, **options)
        numbers = range(len(self._workers), self._fixed or gpus or 1)
        new = [RayWorker(make.remote(self._setup), f"worker {number + 1}") for number in numbers]
        self._workers += new
        return new


@dataclass
class RayWorker:
    """An actor. If its process ends, Ray restarts it on any free machine."""

    actor: Any
    name: str

    def connect(self) -> Future[Ready]:
        """Connect, with Ray's own retries: a lost machine's actors are unreachable until Ray notices; then they wait
        for room elsewhere, or for the machine."""
        hello = self.actor.hello.options(name="hello", max_task_retries=-1)
        return hello.remote(version_that_matters()).future()

    def run(self, job: Job) -> Future[JobOutcome]:
        """Run a job, without Ray's retries: the job may have killed the process, and another worker may be free."""
        call = self.actor.run.options(name=f"{job.name} {job.content[:8]}", max_task_retries=0)
        return call.remote(job).future()


class RayActor:
    """The process of one GPU, or of a CPU. It keeps the pipelines of its last job, loaded and compiled, while jobs have
    the same model and plan."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._outputs = Outputs(setup.output_dir)
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._loaded: tuple[str, str] | None = None  # model and plan
        self._pipelines: list[Any] = []
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def hello(self, version: str) -> Ready:
        """Return whether this worker can run the command's jobs. version: this pack's, on the command's side."""
        setup, ours, trouble = self._setup, version_that_matters(), ""
        if ours != version:
            trouble = f"it has comfyui-onediff-guard {ours or '?'}, but the command has {version or '?'}"
        elif not (setup.output_dir / setup.token).exists():
            trouble = f"it does not see the folder {setup.output_dir}: --out must be a folder that all machines share"
        elif lacking := [str(models) for models in setup.models if not models.is_dir()]:
            trouble = f"it has no folder {', '.join(lacking)}: every machine must have the models"
        return Ready(self._name, trouble)

    def run(self, job: Job) -> JobOutcome:
        setup, needed = self._setup, job.cache_key[:2]
        if needed != self._loaded:
            self._unload()
        if setup.timeout:
            faulthandler.dump_traceback_later(setup.timeout + LATE_SECONDS, exit=True)
        outcome = execute(job, self._outputs, self._run, self._name)
        faulthandler.cancel_dump_traceback_later()
        self._loaded = needed
        if outcome.end is End.FAILED:  # its state is unknown
            self._unload()
        return outcome

    def _run(self, graph: Graph, output_dir: Path) -> RunResult:
        from ...pipelines.run.handle import PipelineHandle

        setup = self._setup
        folders = {"models": setup.models, "input_dir": setup.input_dir, "output_dir": output_dir}
        result = setup.run(graph, **folders, timeout=setup.timeout)
        made = (value for values in result.results.values() for value in values)
        self._pipelines = [value for value in made if isinstance(value, PipelineHandle)]
        return result

    def _unload(self) -> None:
        """Unload the pipelines. If a kernel's fault broke CUDA in this process, end it: Ray starts another one."""
        self._loaded, self._pipelines = None, []
        gc.collect()  # modules hold reference cycles
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            os._exit(1)


def _end_with(parent: int) -> None:
    """End this process, to free its GPU, as soon as Ray's own process on this machine is gone. Ray takes a minute."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
