"""Ray's actors as workers, one a GPU. Ray starts, places and restarts their processes."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ...trust.text import shown
from ..errors import HostError, WorkflowError
from .content import version_that_matters
from .execution import Outcome
from .jobs import Job
from .ray_token import MODE, keep_private, token_file
from .ray_worker import RayActor, Setup
from .worker_pool import Ready

logger = logging.getLogger(__name__)

INSTALL = 'pip install "comfyui-onediff-guard[scale]", or in a clone: pip install ".[scale]"'
STORE_BYTES = 80 * 2**20  # of a Ray that is started here; nothing large goes through it
CONNECT_SECONDS = 10.0
NO_TOKEN = " Does the cluster ask for no token, though there is one here? Then set RAY_AUTH_MODE=disabled."
COUNT_SECONDS = 5.0  # between two looks how many GPUs there are
NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray would send some to its makers
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # for one machine alone, to which Ray binds its ports then
FEW_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # to reach a cluster's state, of half a minute or so each, and not 20
NO_METRICS = {"RAY_enable_metrics_collection": "0"}  # which keep 3 KB for each name that a job has, for ever


@dataclass(frozen=True)
class Cluster:
    """Which Ray, and how it is used."""

    address: str | None = None  # None: one that is started here and ends with the command
    workers: int | None = None  # None: one a GPU, or where there is none, one
    dashboard: bool = False  # of the Ray that is started here
    verbose: bool = False


def require() -> None:
    """Raises WorkflowError where Ray is not installed. It is not imported yet: that reads variables."""
    if find_spec("ray") is None:
        raise _absent("there is no module ray")


def _absent(why: object) -> WorkflowError:
    return WorkflowError(
        f"'batch' runs jobs with Ray, which is not installed here ({why}). Install it: {INSTALL}. "
        "Or name running ComfyUIs with --server URL, which needs no Ray."
    )


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise _absent(error) from error


@contextmanager
def connected(cluster: Cluster) -> Generator[Any]:
    """A Ray, at `cluster.address` or started here; left, or ended, at the end. What it prints of those that ended goes
    to standard error, or nowhere: standard output is the command's.

    Raises:
        WorkflowError: Ray is not installed.
        HostError: it does not answer there, or does not start.
    """
    _check_address(cluster.address)
    keep_private(make=not cluster.address)
    own: dict[str, Any] = {"address": cluster.address}
    if not cluster.address:
        own = {
            "address": "local",
            "num_cpus": max(cluster.workers or 1, os.cpu_count() or 1),
            "object_store_memory": STORE_BYTES,
            "include_dashboard": cluster.dashboard,
        }
    with ExitStack() as held:
        held.enter_context(redirect_stdout(sys.stderr if cluster.verbose else _Nowhere()))
        held.enter_context(_variables(_token_shown() if cluster.address else {}))
        told = FEW_TRIES if cluster.address else NO_STATISTICS | LOOPBACK
        with _variables(NO_METRICS | told), _signals_kept():
            ray = _ray()
            _check_own_address(ray, cluster.address)
            context = _begun(ray, cluster, own)
        held.callback(_end, ray)
        if cluster.dashboard and (url := getattr(context, "dashboard_url", "")):
            logger.warning("Ray's dashboard: http://%s", url)
        yield ray


def _check_address(address: str | None) -> None:
    """Ask at an address whether anybody listens, since Ray itself asks for minutes."""
    if address in (None, "auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise WorkflowError(
            f"--ray {shown(address)}: expected HOST:PORT as `ray start` prints it, for example 10.0.0.1:6379, or auto."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise HostError(
            f"No Ray answers at {address} ({error.strerror or error}). Start one there with `ray start --head`, check "
            "the address, or leave out --ray to have one started."
        ) from error


def _check_own_address(ray: Any, address: str | None) -> None:
    """Ray takes a loopback address for the machine's own, and would ask there for minutes where a Ray listens to this
    machine alone."""
    host, _, port = (address or "").rpartition(":")
    if host not in ("localhost", "127.0.0.1", "[::1]", "::1"):
        return
    own = ray.util.get_node_ip_address()
    try:
        socket.create_connection((own, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise HostError(
            f"A Ray listens at {address}, but not at {own}:{port}, this machine's own address, by which Ray reaches "
            "it: it is for its own command alone, as one that `batch` starts. Start one with `ray start --head`, "
            f"without {next(iter(LOOPBACK))}=0, or leave out --ray."
        ) from error


def _token_shown() -> dict[str, str]:
    """What has Ray show a cluster the token that is here, if there is one and nothing else was said. With an address
    that is named it does so by itself from 2.61 on only, though a cluster with a token asks for it before."""
    file = token_file()
    there = file is None or file.is_file()
    return {MODE: "token"} if there and MODE not in os.environ else {}


def _begun(ray: Any, cluster: Cluster, own: dict[str, Any]) -> Any:
    try:
        return ray.init(
            **own,
            namespace="onediff-guard",
            log_to_driver=cluster.verbose,
            logging_level=logging.INFO if cluster.verbose else logging.ERROR,
        )
    except Exception as error:  # its own kinds, and those of what it calls
        where = f"at {cluster.address}" if cluster.address else "here"
        ray.shutdown()
        raise HostError(
            f"No Ray {'answers' if cluster.address else 'starts'} {where} ({type(error).__name__}: {error}). "
            "Check the address, and that all machines have the same Ray, Python and ~/.ray/auth_token; or leave "
            "out --ray to have one started."
        ) from error


def _end(ray: Any) -> None:
    with suppress(Exception):  # a cluster that is gone
        ray.shutdown()


class _Nowhere(io.TextIOBase):
    def write(self, text: str, /) -> int:
        return len(text)


class RayPool:
    """Workers of a cluster. A context manager that ends them."""

    def __init__(self, ray: Any, setup: Setup, workers: int | None) -> None:
        self._ray, self._setup, self._fixed = ray, setup, workers
        self._workers: list[RayWorker] = []
        self._counted: float | None = None  # when the cluster's GPUs were counted last
        self.hint = NO_TOKEN if os.environ.get(MODE) == "token" else ""

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self._workers:
            with suppress(Exception):  # it is gone, or the cluster is
                self._ray.kill(worker.actor)

    def new_workers(self) -> list[RayWorker]:
        """At first as many as were asked for, or one a GPU, or one; later one for each GPU that has come."""
        first, now = self._counted is None, time.monotonic()
        if not first and (self._fixed or now - (self._counted or 0.0) < COUNT_SECONDS):
            return []
        self._counted = now
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        number = (self._fixed or gpus or 1) if first else gpus - len(self._workers)
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
        make = self._ray.remote(RayActor).options(max_restarts=-1, max_task_retries=-1, **options)
        new = [RayWorker(make.remote(self._setup), len(self._workers) + each) for each in range(number)]
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


@contextmanager
def _variables(values: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def _signals_kept() -> Generator[None]:
    """Ray answers SIGTERM in its own way, and leaves that so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = [kind for name in ("SIGINT", "SIGTERM") if (kind := getattr(signal, name, None))]
    with ExitStack() as restored:
        for kind in kinds:
            restored.callback(signal.signal, kind, signal.getsignal(kind))
        yield
