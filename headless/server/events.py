"""What a server tells of a run while it runs, over its websocket: progress, and that something has ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp

from ..errors import HeadlessError
from ..hosts.result import Progress, ProgressCallback
from ..workflow.graph import Graph
from .answers import Event, event, label
from .api import Server

RECONNECT_SECONDS = 1.0
CLOSE_SECONDS = 1.0
EVENT_CHARACTERS = 2**20  # of one that is read; longer ones tell of results, which the history has too
PROGRESS_A_SECOND = 100  # at most
BURST = 1000  # of progress, after a quiet time


class Listener:
    """Follows a server's events for as long as an `async with` lasts, connecting again for as long as it takes."""

    def __init__(self, server: Server, graph: Graph, on_progress: ProgressCallback) -> None:
        self.prompt_id: str | None = None  # others' events are dropped, once it is known
        self.connected = asyncio.Event()
        self.ended = asyncio.Event()  # the run may be over: look into the history
        self._server, self._graph, self._on_progress = server, graph, on_progress
        self._node = ""  # id of the one that runs
        self._credit, self._told_at = float(BURST), 0.0

    async def __aenter__(self) -> Listener:
        self._task = asyncio.create_task(self._listen())
        self._task.add_done_callback(lambda _: self.ended.set())
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Take no more events."""
        for _ in range(2):  # a server may take its time to say goodbye, and be cut off then
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)

    async def wait(self, until: asyncio.Event, seconds: float) -> bool:
        """Whether it came to that. Raises what the one raised who is told the progress."""
        waiting = asyncio.ensure_future(until.wait())
        try:
            await asyncio.wait({waiting}, timeout=seconds)  # wait_for may lose a cancellation, up to Python 3.11
        finally:
            waiting.cancel()
        if self._task.done():
            self._task.result()
        return until.is_set()

    async def _listen(self) -> None:
        while True:
            with suppress(aiohttp.ClientError, asyncio.TimeoutError, HeadlessError):
                async with self._server.websocket(clientId=self._server.client_id) as socket:
                    self.connected.set()
                    async for message in socket:  # previews, which are binary, are dropped
                        if message.type is aiohttp.WSMsgType.TEXT and len(message.data) <= EVENT_CHARACTERS:
                            self._take(event(message.data))
                        await asyncio.sleep(0)  # a flood of events leaves the others their turn
            await asyncio.sleep(RECONNECT_SECONDS)

    def _take(self, told: Event | None) -> None:
        if told is None or (self.prompt_id and told.data.prompt_id not in (None, self.prompt_id)):
            return
        if told.ends:
            self.ended.set()
        elif told.type == "executing":
            self._node = told.data.node or ""
            self._tell(Progress(label(self._graph, self._node)))
        elif told.type == "progress":
            node = told.data.node or self._node
            self._tell(Progress(label(self._graph, node), told.data.value, told.data.max))

    def _tell(self, progress: Progress) -> None:
        now = asyncio.get_running_loop().time()
        self._credit = min(BURST, self._credit + (now - self._told_at) * PROGRESS_A_SECOND)
        self._told_at = now
        if self._credit >= 1:
            self._credit -= 1
            self._on_progress(progress)
