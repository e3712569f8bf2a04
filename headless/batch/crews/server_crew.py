"""Running ComfyUIs as workers: each takes one job after another of the same queue, so that its own nodes scale too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from ....trust.text import without_password
from ...server.api import Server
from ...server.follow import run_on_server
from ..affinity import Warmth, landing
from ..crew import Event
from ..jobs import Job
from ..outputs import Outputs
from ..work import Done, Lost, perform

ASK_SECONDS = 5.0  # between two questions to a server that is away
AWAY_SECONDS = 600.0  # that a server may be away before it is given up: whoever looks after it starts it again


class ServerCrew:
    """The servers of a batch. A context manager that takes their runs from them."""

    def __init__(self, urls: Sequence[str], outputs: Outputs, input_dir: Path | None, timeout: float | None) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.stop = threading.Event()
        self.outputs, self.input_dir, self.timeout = outputs, input_dir, timeout
        self.pool = ThreadPoolExecutor(max_workers=len(urls), thread_name_prefix="batch-server")
        self.workers = [ServerWorker(self, url) for url in urls]

    def __enter__(self) -> ServerCrew:
        for worker in self.workers:
            worker.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop.set()
        self.pool.shutdown(wait=True, cancel_futures=True)


class ServerWorker:
    """One running ComfyUI."""

    def __init__(self, crew: ServerCrew, url: str) -> None:
        self.name = without_password(url)
        self.ready = False
        self.warm: Collection[Warmth] = ()
        self._crew, self._url = crew, url

    def begin(self) -> None:
        self._crew.pool.submit(self._await)

    def start(self, job: Job) -> None:
        self._crew.pool.submit(self._do, job, tuple(self.warm))

    def renew(self) -> None:
        self.ready, self.warm = False, ()
        self.begin()

    def end(self) -> None:
        """Nothing: a run there has its own time, after which it is taken from the server."""

    def _do(self, job: Job, warm: tuple[Warmth, ...]) -> None:
        crew = self._crew
        run = partial(run_on_server, url=self._url, input_dir=crew.input_dir, timeout=crew.timeout, stop=crew.stop)
        outcome = perform(job, crew.outputs, run, self.name, landing(job.warmth, warm))
        if isinstance(outcome, Done):  # ComfyUI keeps what it ran last, as far as it has room
            kept = {each for each in warm if each.loaded == job.warmth.loaded}
            outcome = replace(outcome, warm=(*kept, job.warmth))
        crew.events.put(Event(self, job, outcome))

    def _await(self) -> None:
        """Until the server answers."""
        until = time.monotonic() + AWAY_SECONDS
        while not self._crew.stop.is_set():
            if asyncio.run(_answers(self._url)):
                self.ready = True
                self._crew.events.put(Event(self))
                return
            if time.monotonic() > until:
                self._crew.events.put(Event(self, None, Lost(f"it did not answer for {AWAY_SECONDS:g} s")))
                return
            self._crew.stop.wait(ASK_SECONDS)


async def _answers(url: str) -> bool:
    async with Server(url) as server:
        return await server.alive()
