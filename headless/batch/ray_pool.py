"""Ray's actors as workers, one a GPU. Ray starts, places and restarts their processes."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...trust.text import shown
from ..errors import HostError, WorkflowError
from .content import version_that_matters
from .jobs import Job
from .ray_worker import RayActor, Setup
from .worker_pool import Outcome, Ready

INSTALL = 'pip install "comfyui-onediff-guard[scale]", or in a clone: pip install ".[scale]"'
STORE_BYTES = 80 * 2**20  # of a Ray that is started here; nothing large goes through it
NO_TOKEN = " Does the cluster ask for no token, though there is one here? Then set RAY_AUTH_MODE=disabled."
COUNT_SECONDS = 5.0  # between two looks how many GPUs there are

# Variables that Ray reads when it is imported and when it starts
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # for one machine alone, to which Ray binds its ports then
NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray would send some to its makers
FEW_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # to reach a cluster's state, of half a minute or so each, and not 20
NO_METRICS = {"RAY_enable_metrics_collection": "0"}  # which keep 3 KB for each name that a job has, for ever


def require() -> None:
    """Raises WorkflowError where Ray is not installed. It is not imported yet: that reads variables."""
    if find_spec("ray") is None:
        raise WorkflowError(
            f"'batch' runs jobs with Ray, which is not installed here. Install it: {INSTALL}. "
            "Or name running ComfyUIs with --server URL, which needs no Ray."
        )


@contextmanager
def connected(address: str | None, workers: int | None = None, *, verbose: bool = False) -> Generator[Any]:
    """A Ray, left or ended at the end. What it prints goes to standard error, or nowhere: standard output is the
    command's.

    Args:
        address: of a cluster; None: a Ray is started here.
        workers: None: one a GPU, or where there is none, one.

    Raises:
        WorkflowError: the address is none.
        HostError: it does not answer there, or does not start.
    """
    own: dict[str, Any] = {"address": address}
    if address and not re.fullmatch(r"auto|[^/]+:[0-9]{1,5}", address):
        raise WorkflowError(
            f"--ray {shown(address)}: expected HOST:PORT as `ray start` prints it, for example 10.0.0.1:6379, or auto."
        )
    if address:
        os.environ.update(FEW_TRIES | NO_METRICS)
        _show_token()
    else:
        os.environ.update(LOOPBACK | NO_STATISTICS | NO_METRICS)
        os.environ.setdefault(MODE, "token")
        os.environ[TOKEN] = secrets.token_hex(32)  # of this Ray alone: nobody else can connect
        cpus = max(workers or 1, os.cpu_count() or 1)
        own = {"address": "local", "num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(sys.stderr if verbose else nowhere):
        ray: Any = import_module("ray")
        sigterm = signal.getsignal(signal.SIGTERM)
        try:
            level = logging.INFO if verbose else logging.ERROR
            ray.init(**own, namespace="onediff-guard", log_to_driver=verbose, logging_level=level)
        except Exception as error:  # its own kinds, and those of what it calls
            ray.shutdown()
            raise HostError(
                f"No Ray {f'answers at {address}' if address else 'starts here'} ({type(error).__name__}: {error}). "
                "Check the address, and that all machines have the same Ray, Python and ~/.ray/auth_token; or leave "
                "out --ray to have one started."
            ) from error
        with suppress(ValueError):  # which another thread cannot set, nor has Ray then
            signal.signal(signal.SIGTERM, sigterm)  # Ray answers it in its own way, and leaves that so
        try:
            yield ray
        except HostError as error:
            raise HostError(f"{error}{NO_TOKEN if address and os.environ.get(MODE) == 'token' else ''}") from error
        finally:
            with suppress(Exception):  # a cluster that is gone
                ray.shutdown()


def _show_token() -> None:
    """Have Ray show a cluster the token that is here, if there is one and nothing else was said. With an address that
    is named it does so by itself from 2.61 on only, though a cluster with a token asks for it before."""
    file = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if os.environ.get(TOKEN) or file.is_file():
        os.environ.setdefault(MODE, "token")


class RayPool:
    """Workers of a cluster. A context manager that ends them."""

    def __init__(self, ray: Any, setup: Setup, workers: int | None) -> None:
        self._ray, self._setup, self._fixed = ray, setup, workers
        self._workers: list[RayWorker] = []
        self._count_at = 0.0  # when the cluster's GPUs are counted next

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self._workers:
            with suppress(Exception):  # it is gone, or the cluster is
                self._ray.kill(worker.actor)

    def new_workers(self) -> list[RayWorker]:
        """At first as many as were asked for, or one a GPU, or one; later one for each GPU that has come."""
        if self._workers and (self._fixed or time.monotonic() < self._count_at):
            return []
        self._count_at = time.monotonic() + COUNT_SECONDS
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
        make = self._ray.remote(RayActor).options(max_restarts=-1, max_task_retries=-1, **options)
        numbers = range(len(self._workers), self._fixed or gpus or 1)
        new = [RayWorker(make.remote(self._setup), number) for number in numbers]
        self._workers += new
        return new


class RayWorker:
    """An actor. Ray starts it anew when its process ends, wherever there is room."""

    def __init__(self, actor: Any, number: int) -> None:
        self.actor, self.name = actor, f"worker {number + 1}"

    def connect(self) -> Future[Ready]:
        """Asked by Ray again and again: a lost machine's actors are out of reach until Ray knows that it is lost, and
        wait then until there is room elsewhere, or it comes back."""
        hello = self.actor.hello.options(name="hello", max_task_retries=-1)
        return hello.remote(version_that_matters()).future()

    def run(self, job: Job) -> Future[Outcome]:
        """Not tried again by Ray: the job may be the reason why the process ends, and another worker may be free."""
        call = self.actor.run.options(name=f"{job.name} {job.content[:8]}", max_task_retries=0)
        return call.remote(job).future()
