"""Running ComfyUIs as workers, with whatever nodes they have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ...trust.text import without_password
from ..errors import HostError, UnknownNodesError
from ..server.api import Server
from ..server.follow import read_for_server, run_on_server
from ..workflow.graph import Graph
from ..workflow.schema import Schema
from .execution import Outcome, WorkerUnavailable, execute
from .jobs import Job
from .outputs import Outputs
from .worker_pool import Ready

ASK_SECONDS = 5.0  # between two questions to a server that is away
ANSWER_SECONDS = 5.0  # for the answer to one
MAX_PAUSE_SECONDS = 60.0  # before a server that answers, and takes no job, is given another one
AWAY_SECONDS = 600.0  # without any job done, after which a server that is away is given up
PATIENCE_SECONDS = 60.0  # that one may be out of reach in the middle of a job


class ServersReader:
    """Reads workflows for several ComfyUIs: with the schemas of the first that answers and has all of their nodes.

    Raises:
        HostError: none of them answers.
        UnknownNodesError: none has all node types; of one of them, which those are.
    """

    def __init__(self, urls: Sequence[str], timeout: float | None = None) -> None:
        self._urls, self._timeout = [*dict.fromkeys(urls)], timeout

    def __call__(self, workflow: Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
        faults: list[HostError | UnknownNodesError] = []
        for url in list(self._urls):
            try:
                found = read_for_server(workflow, url=url, timeout=self._timeout)
            except (HostError, UnknownNodesError) as fault:  # noqa: PERF203
                faults.append(fault)
            else:
                self._urls.remove(url)
                self._urls.insert(0, url)  # the next workflow asks it first
                return found
        raise next((fault for fault in faults if isinstance(fault, UnknownNodesError)), faults[0])


class ServerPool:
    """The servers of a batch. A context manager that takes their runs from them.

    tell: is given a line about a server that does not answer.
    """

    hint = ""

    def __init__(
        self,
        urls: Sequence[str],
        outputs: Outputs,
        input_dir: Path | None,
        timeout: float | None,
        tell: Callable[[str], None],
    ) -> None:
        self.outputs, self.input_dir, self.timeout, self.tell = outputs, input_dir, timeout, tell
        self.stop = threading.Event()
        self.threads = ThreadPoolExecutor(max_workers=len(urls), thread_name_prefix="batch-server")
        self._workers = [ServerWorker(self, url) for url in urls]
        self._new = [*self._workers]
        self._last_work = time.monotonic()

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop.set()
        self.threads.shutdown(wait=True, cancel_futures=True)

    def new_workers(self) -> list[ServerWorker]:
        """All of them at first, and none later: who is away is asked again and again."""
        new, self._new = self._new, []
        return new

    def idle_seconds(self) -> float:
        """How long no server has done anything."""
        if any(worker.busy for worker in self._workers):
            self._last_work = time.monotonic()
        return time.monotonic() - self._last_work


class ServerWorker:
    """One running ComfyUI."""

    def __init__(self, pool: ServerPool, url: str) -> None:
        self.name = without_password(url)
        self.busy = False
        self._pool, self._url = pool, url
        self._in_vain = 0  # jobs in a row that it could not be given

    def connect(self) -> Future[Ready]:
        return self._pool.threads.submit(self._connect)

    def run(self, job: Job) -> Future[Outcome]:
        self.busy = True
        return self._pool.threads.submit(self._run, job)

    def _run(self, job: Job) -> Outcome:
        pool = self._pool
        run = partial(
            run_on_server,
            url=self._url,
            input_dir=pool.input_dir,
            timeout=pool.timeout,
            patience=PATIENCE_SECONDS,
            stop=pool.stop,
        )
        try:
            outcome = execute(job, pool.outputs, run, self.name)
        finally:
            pool.idle_seconds()
            self.busy = False
        self._in_vain = self._in_vain + 1 if isinstance(outcome, WorkerUnavailable) else 0
        return outcome

    def _connect(self) -> Ready:
        """Wait until the server answers: as long as others work, that may take any time."""
        pause = min(ASK_SECONDS * 2 ** (self._in_vain - 1), MAX_PAUSE_SECONDS) if self._in_vain else 0.0
        told = False
        while not self._pool.stop.wait(pause):
            if self._pool.idle_seconds() > AWAY_SECONDS:
                return Ready(self.name, f"it did no job for {AWAY_SECONDS:g} s, and nor did any other")
            if asyncio.run(_answers(self._url)):
                return Ready(self.name)
            if not told:
                self._pool.tell(f"{self.name}: It does not answer. It gets jobs as soon as it does.")
                told = True
            pause = ASK_SECONDS
        return Ready(self.name, "the batch ended")


async def _answers(url: str) -> bool:
    async with Server(url) as server:
        try:
            return await asyncio.wait_for(server.alive(), ANSWER_SECONDS)
        except asyncio.TimeoutError:
            return False
