"""A run on a running ComfyUI, from submission to the last downloaded file.

The websocket tells about progress and that something has ended; the history is what counts. So it does not matter
how the server says that a run is over (`executing` with node null in 0.0.1, `execution_success` and its siblings
since), and a websocket that breaks costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ...trust import paths
from ...trust.foreign import Unreadable
from ..errors import HeadlessError, HostError, InterruptedRunError, RunFailedError, ServerLostError, WorkflowError
from ..files import arriving, ensure_writable, file_entries
from ..hosts import input_images
from ..hosts.result import ProgressCallback, RunResult, no_progress
from ..workflow import settings, ui_format
from ..workflow.graph import Graph, from_api, is_ui_format
from ..workflow.schema import Schema
from .answers import HistoryEntry
from .api import Place, Server
from .events import RECONNECT_SECONDS, Listener
from .wire import reason

logger = logging.getLogger(__name__)

POLL_SECONDS = 3.0  # between two looks into the history, should the websocket miss the end
CONNECT_SECONDS = 5.0  # for the websocket, before the run starts without it
PATIENCE_SECONDS = 60.0  # how long a server may be out of reach in the middle of a run
SETTLE_SECONDS = 0.1  # between a run's last event and its entry in the history
CANCEL_SECONDS = 3.0
LAST_SECONDS = 5.0  # for what is to be put in order when the time is up
STOP_LOOK_SECONDS = 0.2  # between two looks whether it is to stop
MAX_FILES = 20_000  # that a run leaves
T = TypeVar("T")


def run_on_server(
    workflow: Graph | Mapping[str, Any],
    *,
    url: str,
    output_dir: Path,
    input_dir: Path | None = None,
    reads_from: Path | None = None,
    changes: Sequence[settings.Setting] = (),
    timeout: float | None = None,
    patience: float = PATIENCE_SECONDS,
    stop: threading.Event | None = None,
    on_progress: ProgressCallback = no_progress,
) -> RunResult:
    """Run a workflow on a running ComfyUI and download what it saved.

    Args:
        workflow: a graph, or a workflow's JSON in API or UI format.
        url: the server's address; no other is followed.
        output_dir: where results go; made if it isn't there.
        input_dir: images that the workflow names and that are in here are uploaded first.
        reads_from: the input folder of a server on this machine: a workflow that names images outside is refused.
        changes: inputs to set first.
        timeout: seconds for all of it, the download too. A run that is not done by then is interrupted.
        patience: seconds that the server may be out of reach.
        stop: interrupts the run once it is set, from any thread.
        on_progress: told each node and step.

    Raises:
        HostError: no ComfyUI answers there.
        WorkflowError: the server refuses the workflow, or it names images that may not be read; nothing ran.
        RunFailedError: a node raised, the time was up, or the server was lost.
        InterruptedRunError: somebody interrupted the run there. Ctrl-C here interrupts it and is raised as
            KeyboardInterrupt.
        OutputError: a result could not be written.
    """

    return _through(
        _Job(Server(url), patience, on_progress),
        timeout,
        lambda job: job.run(workflow, output_dir, input_dir, reads_from, changes),
        stop,
    )


def read_for_server(
    workflow: Graph | Mapping[str, Any], *, url: str, timeout: float | None = None
) -> tuple[Graph, dict[str, Schema]]:
    """A workflow, and the schemas of its node types on a running ComfyUI. timeout: in seconds.

    Raises:
        HostError: no ComfyUI answers there.
        WorkflowError: it is no workflow, or the server lacks some of its node types.
        RunFailedError: the time was up.
    """

    return _through(_Job(Server(url)), timeout, lambda job: job.read(workflow))


def _through(
    job: _Job,
    timeout: float | None,
    work: Callable[[_Job], Coroutine[Any, Any, T]],
    stop: threading.Event | None = None,
) -> T:
    """What came of the work. Whether it fails, its time is up, or Ctrl-C or `stop` ends it, it is over when this
    returns."""
    until = time.monotonic() + timeout if timeout else None

    async def within_time() -> T:
        async with job.server:
            task = asyncio.ensure_future(work(job))
            try:
                await (asyncio.wait({task}, timeout=timeout) if stop is None else _unless(stop, task, until))
            finally:
                while not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=LAST_SECONDS)
            try:
                return task.result()
            except asyncio.CancelledError:
                if stop is not None and stop.is_set():
                    raise InterruptedRunError(f"The run on {job.server.name} was interrupted.") from None
                raise RunFailedError(f"{job.out_of_time} ({timeout:g} s).") from None
            except aiohttp.ClientError as error:
                raise HostError(f"{job.server.name} broke off the connection: {reason(error)}.") from error

    return asyncio.run(within_time())


async def _unless(stop: threading.Event, task: asyncio.Task[Any], until: float | None) -> None:
    """Wait for the task until it is to stop, or its time is up. until: on the monotonic clock."""
    while not (task.done() or stop.is_set() or (until is not None and time.monotonic() >= until)):
        left = STOP_LOOK_SECONDS if until is None else min(STOP_LOOK_SECONDS, max(until - time.monotonic(), 0))
        await asyncio.wait({task}, timeout=left)


class _Job:
    """One workflow on its way through a server."""

    def __init__(self, server: Server, patience: float = 0.0, on_progress: ProgressCallback = no_progress) -> None:
        self.server = server
        self.patience = patience
        self.on_progress = on_progress
        self.prompt_id: str | None = None
        self.out_of_time = f"{server.name} did not describe its nodes in time; nothing ran"

    async def run(
        self,
        workflow: Graph | Mapping[str, Any],
        output_dir: Path,
        input_dir: Path | None,
        reads_from: Path | None,
        changes: Sequence[settings.Setting],
    ) -> RunResult:
        graph, schemas = await self.read(workflow)
        graph = settings.apply(graph, changes, schemas)
        ensure_writable(output_dir)
        if reads_from is not None:
            input_images.check(graph, schemas, reads_from)
        if input_dir is not None:
            self.out_of_time = f"{self.server.name} did not take the images in time; nothing ran"
            graph = await self._upload(graph, schemas, input_dir)
        started = time.perf_counter()
        entry = await self._until_done(graph)
        self.out_of_time = f"The run is done, but {self.server.name} did not hand out all of its files in time"
        files = await self._download(entry.outputs, output_dir)
        return RunResult(entry.outputs, {}, files, time.perf_counter() - started)

    async def read(self, workflow: Graph | Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
        if not isinstance(workflow, Graph) and is_ui_format(workflow):
            schemas = await self.server.schemas(ui_format.class_types(workflow))
            return ui_format.convert(workflow, schemas), schemas
        graph = workflow if isinstance(workflow, Graph) else from_api(workflow)
        return graph, await self.server.schemas(graph.class_types())

    async def _upload(self, graph: Graph, schemas: Mapping[str, Schema], folder: Path) -> Graph:
        """The graph with the names that its images have on the server; those that are not in the folder stay."""
        there: dict[Path, str] = {}
        values: dict[str, dict[str, str]] = {}
        for node, name, value in input_images.images_of(graph, schemas):
            image, kind = input_images.folder_of(value)
            try:
                path = input_images.find(folder, image) if kind == "input" else None
            except paths.Outside as fault:
                raise WorkflowError(f"{node.label}: {fault}. Images are read from --input {folder} only.") from None
            if path is not None:
                if path not in there:
                    there[path] = await self._upload_one(path)
                values.setdefault(node.id, {})[name] = there[path]
        return graph.with_inputs(values)

    async def _upload_one(self, path: Path) -> str:
        try:
            return await self.server.upload(path.name, input_images.read(path))
        except WorkflowError as error:
            raise WorkflowError(f"{error} It was not sent, and nothing ran.") from None
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            reasons = f"{path}: {reason(error)}"
            raise HostError(f"{self.server.name} did not take the image {reasons}. Nothing ran.") from error

    async def _until_done(self, graph: Graph) -> HistoryEntry:
        """The run's history entry. Whatever goes wrong before it is there (an error, the time, Ctrl-C), the run is
        taken from the server."""
        self.out_of_time = f"{self.server.name} did not take the workflow in time"
        async with Listener(self.server, graph, self.on_progress) as events:
            await events.wait(events.connected, CONNECT_SECONDS)
            try:
                events.prompt_id = await self._submit(graph)
                self.out_of_time = "The run was not done in time and was interrupted"
                entry = await self._follow(events.prompt_id, events)
            except BaseException:
                await self._cancel(events)
                raise
        try:
            failure = entry.failure(graph, self.server.name)
        except Unreadable as error:
            raise RunFailedError(
                f"{self.server.name} says that the run failed, but not readably why: {error}."
            ) from None
        if failure:
            raise failure
        return entry

    async def _submit(self, graph: Graph) -> str:
        try:
            taken = await self.server.submit(graph)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise HostError(f"{self.server.name} did not take the workflow: {reason(error)}.") from error
        self.prompt_id = taken.prompt_id
        if taken.refusal:
            raise WorkflowError(taken.refusal)
        return taken.prompt_id

    async def _cancel(self, events: Listener) -> None:
        """Take the run from the server, within CANCEL_SECONDS; whoever stops this meanwhile waits for it."""
        taking = asyncio.ensure_future(self._take_back(events))
        while not taking.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({taking})

    async def _take_back(self, events: Listener) -> None:
        await events.stop()  # a flood of them would leave no time for it
        try:
            await asyncio.wait_for(self.server.cancel(self.prompt_id), CANCEL_SECONDS)
        except (aiohttp.ClientError, asyncio.TimeoutError, HeadlessError) as error:
            logger.info("The run could not be taken from %s: %s.", self.server.name, reason(error))
            self.out_of_time = f"The run was not done in time, and {self.server.name} took no interrupt: it may go on"

    async def _follow(self, prompt_id: str, events: Listener) -> HistoryEntry:
        gone = 0
        while True:
            if await events.wait(events.ended, POLL_SECONDS):
                await asyncio.sleep(SETTLE_SECONDS)
            events.ended.clear()
            place = await self._patiently(lambda: self.server.place(prompt_id))
            if place.entry is not None:
                return place.entry
            gone = gone + 1 if place.state == "gone" else 0
            if gone > 1:
                raise ServerLostError(
                    f"{self.server.name} no longer knows the run {prompt_id}: it was taken out of the queue, or "
                    "ComfyUI was restarted. Run it again."
                )

    async def _patiently(self, ask: Callable[[], Awaitable[Place]]) -> Place:
        """Ask until there is an answer. A server that is merely busy may take any time, one that is away may not."""
        lost_since: float | None = None
        while True:
            try:
                return await ask()
            except aiohttp.SocketTimeoutError:  # noqa: PERF203
                lost_since = None
            except (aiohttp.ClientError, asyncio.TimeoutError, HostError) as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > self.patience:
                    raise ServerLostError(
                        f"{self.server.name} does not answer any more ({reason(error)}). "
                        "Look at its log: ComfyUI may have run out of memory."
                    ) from error
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _download(self, outputs: Mapping[str, Mapping[str, Any]], output_dir: Path) -> list[Path]:
        entries = [entry for ui in outputs.values() for entry in file_entries(ui) if entry.type != "input"]
        if len(entries) > MAX_FILES:
            raise RunFailedError(
                f"{self.server.name} lists {len(entries):,} files of this run, more than {MAX_FILES:,}."
            )
        files = []
        for entry in entries:
            folder = entry.folder_in(output_dir)
            with arriving(folder, entry.filename) as file:
                await self.server.download(entry, file, folder)
            files.append(file.path)
        return files
