"""Running ComfyUIs as workers: each takes one job after another of the same queue, so that its own nodes scale too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ....trust.text import without_password
from ...errors import HostError, UnknownNodesError
from ...server.api import Server
from ...server.follow import read_for_server, run_on_server
from ...workflow.graph import Graph
from ...workflow.schema import Schema
from ..affinity import Warmth, landing
from ..crew import Event
from ..jobs import Job
from ..outputs import Outputs
from ..work import Away, Done, Failed, Lost, Refused, perform

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


class ServerCrew:
    """The servers of a batch. A context manager that takes their runs from them."""

    def __init__(self, urls: Sequence[str], outputs: Outputs, input_dir: Path | None, timeout: float | None) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.stop = threading.Event()
        self.outputs, self.input_dir, self.timeout = outputs, input_dir, timeout
        self.worked = time.monotonic()  # when a job came to its end last
        self.pool = ThreadPoolExecutor(max_workers=len(urls), thread_name_prefix="batch-server")
        self.workers = [ServerWorker(self, url) for url in urls]

    def __enter__(self) -> ServerCrew:
        for worker in self.workers:
            worker.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop.set()
        self.pool.shutdown(wait=True, cancel_futures=True)

    def grow(self) -> None:
        """Nothing: these servers were named, and those that are away are asked again and again."""

    def idle_seconds(self) -> float:
        """How long no server has done anything."""
        return 0.0 if any(worker.busy for worker in self.workers) else time.monotonic() - self.worked


class ServerWorker:
    """One running ComfyUI."""

    def __init__(self, crew: ServerCrew, url: str) -> None:
        self.name = without_password(url)
        self.ready = self.busy = False
        self.warm: Collection[Warmth] = ()
        self._crew, self._url = crew, url
        self._in_vain = 0  # jobs in a row that it could not be given

    def begin(self) -> None:
        pause = min(ASK_SECONDS * 2 ** (self._in_vain - 1), MAX_PAUSE_SECONDS) if self._in_vain else 0.0
        self._crew.pool.submit(self._await, pause)

    def start(self, job: Job) -> None:
        self.busy = True
        self._crew.pool.submit(self._do, job, tuple(self.warm))

    def renew(self) -> None:
        self.ready, self.warm = False, ()
        self.begin()

    def end(self) -> None:
        """Nothing: a run there has its own time, after which it is taken from the server."""

    def _do(self, job: Job, warm: tuple[Warmth, ...]) -> None:
        crew = self._crew
        run = partial(
            run_on_server,
            url=self._url,
            input_dir=crew.input_dir,
            timeout=crew.timeout,
            patience=PATIENCE_SECONDS,
            stop=crew.stop,
        )
        outcome = perform(job, crew.outputs, run, self.name, landing(job.warmth, warm))
        self._in_vain = self._in_vain + 1 if isinstance(outcome, Away) else 0
        if isinstance(outcome, (Done, Failed, Refused)):
            crew.worked = time.monotonic()
        self.busy = False
        if isinstance(outcome, Done):  # ComfyUI keeps what it ran last, as far as it has room
            kept = {each for each in warm if each.loaded == job.warmth.loaded}
            outcome = replace(outcome, warm=(*kept, job.warmth))
        elif isinstance(outcome, (Failed, Refused)):
            outcome = replace(outcome, warm=warm)
        crew.events.put(Event(self, job, outcome))

    def _await(self, pause: float) -> None:
        """Until the server answers: as long as others work, that may take any time."""
        crew, told = self._crew, False
        while not crew.stop.wait(pause):
            if crew.idle_seconds() > AWAY_SECONDS:
                crew.events.put(Event(self, None, Lost(f"it did no job for {AWAY_SECONDS:g} s, and nor did any other")))
                return
            if asyncio.run(_answers(self._url)):
                self.ready = True
                crew.events.put(Event(self))
                return
            if not told:
                crew.events.put(Event(self, None, Away("It does not answer. It gets jobs as soon as it does.")))
                told = True
            pause = ASK_SECONDS


async def _answers(url: str) -> bool:
    async with Server(url) as server:
        try:
            return await asyncio.wait_for(server.alive(), ANSWER_SECONDS)
        except asyncio.TimeoutError:
            return False
