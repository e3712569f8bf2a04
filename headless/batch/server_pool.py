"""Running ComfyUIs as workers, with the nodes that they have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from ...trust.message import without_password
from ..errors import HostError, UnknownNodesError
from ..server.api import Server
from ..server.follow import read_for_server, run_on_server
from ..workflow.graph import Graph
from ..workflow.schema import Schema
from .jobs import Job, Read
from .outputs import Outputs
from .worker_pool import End, JobOutcome, Ready, execute

ASK_SECONDS = 5.0  # between two requests to an unreachable server
ANSWER_SECONDS = 5.0  # timeout of each of them
AWAY_SECONDS = 600.0  # without a finished job, before an unreachable server is given up
TAG = 12  # digits of a job's hash in its files' names on a server
PATIENCE_SECONDS = 60.0  # that a server may be unreachable during a job


def reader(urls: Sequence[str], timeout: float | None = None, *, guard: bool = False) -> Read:
    """Return a function that reads workflows for several ComfyUIs, with the schemas of the first one that answers and
    has all node types.

    It raises HostError if none answers, and the UnknownNodesError of one of them if none has all node types.
    """
    order = [*dict.fromkeys(urls)]

    def read(workflow: Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
        faults: list[HostError | UnknownNodesError] = []
        for url in order:
            try:
                found = read_for_server(workflow, url=url, timeout=timeout, guard=guard)
            except (HostError, UnknownNodesError) as fault:  # noqa: PERF203
                faults.append(fault)
            else:
                order.sort(key=lambda each: each != url)  # it is asked first for the next workflow
                return found
        raise max(faults, key=lambda fault: isinstance(fault, UnknownNodesError))

    return read


class ServerPool:
    """The servers of a batch.

    tell: called with a line about a server that does not answer. options: of `run_on_server`.
    """

    def __init__(self, urls: Sequence[str], outputs: Outputs, tell: Callable[[str], None], **options: Any) -> None:
        self.outputs, self.tell, self.stop = outputs, tell, threading.Event()
        self.run = partial(run_on_server, patience=PATIENCE_SECONDS, stop=self.stop, **options)
        self.workers = self._new = [ServerWorker(self, url) for url in dict.fromkeys(urls)]
        self.threads = ThreadPoolExecutor(len(self.workers))
        self.last_work = time.monotonic()

    def close(self) -> None:
        """Remove the servers' runs."""
        self.stop.set()
        self.threads.shutdown(wait=True, cancel_futures=True)

    def new_workers(self) -> list[ServerWorker]:
        """Return all servers at first, and none later: unreachable ones are asked again and again."""
        new, self._new = self._new, []
        return new


class ServerWorker:
    def __init__(self, pool: ServerPool, url: str) -> None:
        self.name, self._pool, self._url = without_password(url), pool, url
        self._pause = 0.0  # seconds before the next request
        self.busy = False

    def connect(self) -> Future[Ready]:
        return self._pool.threads.submit(self._connect)

    def run(self, job: Job) -> Future[JobOutcome]:
        return self._pool.threads.submit(self._run, job)

    def _run(self, job: Job) -> JobOutcome:
        pool, self.busy = self._pool, True
        try:
            run = partial(pool.run, url=self._url, tag=f"-{job.content[:TAG]}")
            outcome = execute(job, pool.outputs, run, self.name)
        finally:
            self.busy = False
        if outcome.end is End.AWAY:
            self._pause = ASK_SECONDS  # it may answer and still accept no job
        else:
            self._pause, pool.last_work = 0.0, time.monotonic()
        return outcome

    def _connect(self) -> Ready:
        """Wait until the server answers, without a limit while others work."""
        pool, told = self._pool, False
        while not pool.stop.wait(self._pause):
            if not any(worker.busy for worker in pool.workers) and time.monotonic() > pool.last_work + AWAY_SECONDS:
                return Ready(self.name, f"no server ran a job for {AWAY_SECONDS:g} s")
            if asyncio.run(_answers(self._url)):
                return Ready(self.name)
            if not told:
                pool.tell(f"{self.name} does not answer. It gets jobs when it answers again.")
            told, self._pause = True, ASK_SECONDS
        return Ready(self.name, "the batch ended")


async def _answers(url: str) -> bool:
    async with Server(url) as server:
        return await server.alive(ANSWER_SECONDS)
