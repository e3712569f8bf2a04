"""Ray's actors as workers, one a GPU. Ray starts and places their processes and carries what goes between them."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any

from ....trust.text import shown
from ...errors import HostError, WorkflowError
from ..affinity import Warmth
from ..content import version_that_matters
from ..crew import Event
from ..jobs import Job
from ..work import Done, Lost, Outcome
from .ray_actor import Actor, Code, Hello, Setup
from .ray_keeper import kept
from .ray_token import MODE, keep_private, token_file

logger = logging.getLogger(__name__)

INSTALL = 'pip install "comfyui-onediff-guard[scale]", or in a clone: pip install ".[scale]"'
STORE_BYTES = 256 * 2**20  # of a Ray that is started here, for compiled code and results on their way
CONNECT_SECONDS = 10.0
NO_TOKEN = " Does the cluster ask for no token, though there is one here? Then set RAY_AUTH_MODE=disabled."
MAX_STARTS = 3  # of one worker in a row that end before it is ready
COUNT_SECONDS = 5.0  # between two looks how many GPUs there are
CODES = 64  # files of compiled code that are remembered for workers that begin later
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
        mark = {} if cluster.address else held.enter_context(kept())
        held.enter_context(redirect_stdout(sys.stderr if cluster.verbose else _Nowhere()))
        held.enter_context(_variables(_token_shown() if cluster.address else {}))
        told = FEW_TRIES if cluster.address else NO_STATISTICS | LOOPBACK | mark
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


class RayCrew:
    """Workers of a cluster. A context manager that ends them."""

    def __init__(self, ray: Any, setup: Setup, workers: int | None) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.ray = ray
        self.arrived: SimpleQueue[tuple[str, Code]] = SimpleQueue()  # compiled code, and the node that it came from
        self._codes: OrderedDict[tuple[str, str], Any] = OrderedDict()  # (its name, that node) → reference
        self._setup, self._fixed = setup, workers is not None
        self.workers: list[RayWorker] = []
        self._gpus = 0  # that have a worker
        self._counted = time.monotonic()
        gpus = self._count()
        self._add(workers or gpus or 1, on_gpus=gpus > 0)

    def __enter__(self) -> RayCrew:
        for worker in self.workers:
            worker.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self.workers:
            worker.end()

    def grow(self) -> None:
        """A worker for each GPU that has come, unless a number was given: Ray gives one that waits the first place that
        it finds, on whatever machine."""
        if self._fixed or time.monotonic() - self._counted < COUNT_SECONDS:
            return
        self._counted = time.monotonic()
        for worker in self._add(self._count() - self._gpus, on_gpus=True):
            worker.begin()

    def _count(self) -> int:
        """The cluster's GPUs."""
        return int(self.ray.cluster_resources().get("GPU", 0))

    def _add(self, workers: int, *, on_gpus: bool) -> list[RayWorker]:
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if on_gpus else {"num_cpus": 1}
        make = self.ray.remote(Actor).options(max_restarts=0, **options)
        first = len(self.workers)
        new = [RayWorker(self, make, self._setup, first + number) for number in range(workers)]
        self.workers += new
        self._gpus += len(new) if on_gpus else 0
        return new

    def codes(self) -> dict[tuple[str, str], Any]:
        """Compiled code that workers on other machines are to have, by its name and the node that it came from. It is
        the command's own in Ray's store: a machine that is lost takes none with it."""
        while not self.arrived.empty():
            node, code = self.arrived.get()
            self._codes[code.name, node] = self.ray.put(code)
            self._codes.move_to_end((code.name, node))
        while len(self._codes) > CODES:
            self._codes.popitem(last=False)
        return dict(self._codes)


class RayWorker:
    """One place for an actor, and the actor that is there."""

    def __init__(self, crew: RayCrew, make: Any, setup: Setup, number: int) -> None:
        self.name = f"worker {number + 1}"
        self.ready = False
        self.warm: Collection[Warmth] = ()
        self._crew, self._make, self._setup = crew, make, setup
        self._actor: Any = None
        self._node = ""
        self._starts = 0
        self._given: dict[tuple[str, str], Any] = {}  # compiled code that this actor was sent

    def begin(self) -> None:
        """Have Ray make an actor. An event tells when it is ready."""
        self._actor = self._make.remote(self._setup)
        self._starts += 1
        hello = self._actor.hello.options(name="hello").remote(version_that_matters())
        hello.future().add_done_callback(partial(self._greeted, self._actor))

    def start(self, job: Job) -> None:
        codes = self._codes()
        call = self._actor.run.options(name=f"{job.name} {job.content[:8]}")
        call.remote(job, *codes).future().add_done_callback(partial(self._ended, job))

    def renew(self) -> None:
        self.end()
        self.ready, self.warm, self._node, self._given = False, (), "", {}
        self.begin()

    def end(self) -> None:
        with suppress(Exception):  # it is gone, or the cluster is
            self._crew.ray.kill(self._actor)

    def _codes(self) -> list[Any]:
        """References to code that other machines compiled and this one has not been sent."""
        news = {
            key: reference
            for key, reference in self._crew.codes().items()
            if key[1] != self._node and self._given.get(key) is not reference
        }
        self._given |= news
        return list(news.values())

    def _greeted(self, actor: Any, future: Any) -> None:
        try:
            hello: Hello = future.result()
        except Exception as error:  # noqa: BLE001 - of Ray's kinds: it died, or its class cannot be loaded there
            if actor is self._actor:
                last = self._starts >= MAX_STARTS or not _died(error)
                reason = _in_words(error) + (NO_TOKEN if os.environ.get(MODE) == "token" else "")
                self._crew.events.put(Event(self, None, Lost(reason) if last else None))
            return
        self._starts = 0
        self.name, self._node = hello.name, hello.node
        self.ready = not hello.trouble
        self._crew.events.put(Event(self, None, Lost(hello.trouble) if hello.trouble else None))

    def _ended(self, job: Job, future: Any) -> None:
        try:
            outcome: Outcome = future.result()
        except Exception as error:  # noqa: BLE001 - of Ray's kinds
            outcome = Lost(_in_words(error))
        if isinstance(outcome, Done) and outcome.code:
            sent = self._actor.code.options(name="compiled code").remote(outcome.code)
            sent.future().add_done_callback(partial(self._sent, job, outcome))
        else:
            self._crew.events.put(Event(self, job, outcome))

    def _sent(self, job: Job, outcome: Outcome, future: Any) -> None:
        """A job's end is told after what it compiled is here, so that the next job anywhere has it."""
        with suppress(Exception):  # the worker ended meanwhile: others compile for themselves
            self._crew.arrived.put((self._node, future.result()))
        self._crew.events.put(Event(self, job, outcome))


def _died(error: Exception) -> bool:
    from ray.exceptions import RayActorError, RayTaskError

    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _in_words(error: Exception) -> str:
    """Ray's words, without its advice and traces of the whole."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:1000] or type(error).__name__


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
