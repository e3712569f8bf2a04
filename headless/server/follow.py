"""A run on a running ComfyUI, from submission to the last downloaded file.

The history shows when and how a run ended, in the same way in all versions. The websocket is used for progress only, so
a broken one does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ...trust.foreign import Unreadable
from ..errors import (
    HeadlessError,
    HostError,
    InterruptedRunError,
    NoAnswerError,
    RunFailedError,
    ServerLostError,
    TooLongError,
    WorkflowError,
)
from ..files import arriving, ensure_writable, file_entries
from ..hosts import input_images
from ..hosts.result import ProgressCallback, RunProgress, RunResult, no_progress
from ..workflow import settings, ui_format
from ..workflow.graph import Graph
from ..workflow.schema import Schema
from ..workflow.ui_texts import PREFIX
from .answers import HistoryEntry, event, label
from .api import Server

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between two requests of the history
QUEUE_LOOKS = 6  # requests of the history for each one of the queue, which contains all prompts in full
CONNECT_SECONDS = 5.0  # for the websocket, before the run starts without it
RECONNECT_SECONDS = 1.0
EVENT_CHARACTERS = 2**20  # longest event that is read; longer ones are results, which the history has too
PROGRESS_A_SECOND = 200  # most progress events per second
PATIENCE_SECONDS = 60.0  # that a server may be unreachable during a run
CANCEL_SECONDS = 3.0
TOLD_SECONDS = 1.0  # to wait for the last progress event after the end
LAST_SECONDS = 5.0  # for cleaning up after the time limit
STOP_LOOK_SECONDS = 0.2  # between two checks of `stop`
MAX_FILES = 20_000  # of one run
GUARD = "OneDiffGuardNaNGuardNative"  # that a server needs to guard a workflow
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
    guard: bool = False,
    tag: str = "",
    patience: float = PATIENCE_SECONDS,
    stop: threading.Event | None = None,
    on_progress: ProgressCallback = no_progress,
) -> RunResult:
    """Run a workflow on a running ComfyUI and download what it saved.

    workflow, output_dir, changes, on_progress: as in `run_local`.
    url: the server's address; redirects are refused.
    input_dir: folder of images to upload if the workflow names them.
    reads_from: the input folder of a server on this machine; a workflow that names images outside is refused.
    timeout: seconds for everything, downloads included. A longer run is interrupted.
    guard: whether the server guards the MODELs and VAEs of the workflow.
    tag: is part of the files' names on the server only. Servers with one output folder number their files alike, and
        would overwrite each other's.
    patience: seconds that the server may be unreachable.
    stop: interrupts the run once it is set, from any thread.

    Raises HostError if no ComfyUI answers, WorkflowError if the server refuses the workflow or it names forbidden
    images (nothing ran), RunFailedError if a node raised, the time limit passed or the server was lost,
    InterruptedRunError if somebody interrupted the run there, OutputError if a result could not be written.
    Ctrl-C here interrupts the run and is raised as KeyboardInterrupt.
    """
    job = _ServerRun(Server(url), guard, patience, on_progress)

    async def work() -> RunResult:
        graph, schemas = await job.read(workflow)
        graph = settings.apply(graph, changes, schemas)
        ensure_writable(output_dir)
        if reads_from is not None:  # older ComfyUIs would read images from anywhere
            list(input_images.images_of(graph, schemas, reads_from))
        if input_dir is not None:
            graph = await job.upload(graph, schemas, input_dir)
        named = [node for node in graph.nodes.values() if tag and isinstance(node.inputs.get(PREFIX), str)]
        graph = graph.with_inputs({node.id: {PREFIX: f"{node.inputs[PREFIX]}{tag}"} for node in named})
        started = time.perf_counter()
        entry = await job.until_done(graph)
        files = await job.download(entry.outputs, output_dir, tag)
        return RunResult(entry.outputs, {}, files, time.perf_counter() - started, entry.guards())

    return _through(job, timeout, work(), stop)


def read_for_server(
    workflow: Graph | Mapping[str, Any], *, url: str, timeout: float | None = None, guard: bool = False
) -> tuple[Graph, dict[str, Schema]]:
    """A workflow, and the schemas of its node types on a running ComfyUI. timeout: in seconds. guard: as of
    `run_on_server`.

    Raises HostError where no ComfyUI answers there, WorkflowError where it is no workflow, or the server lacks some of
    its node types, RunFailedError where the time was up.
    """
    job = _ServerRun(Server(url), guard)
    return _through(job, timeout, job.read(workflow))


def _through(
    job: _ServerRun, timeout: float | None, work: Coroutine[Any, Any, T], stop: threading.Event | None = None
) -> T:
    """Run the work to its end and return its result. When this returns or raises, the work has stopped: also after
    an error, the time limit, Ctrl-C or `stop`."""
    until = time.monotonic() + timeout if timeout else float("inf")

    async def within_time() -> T:
        async with job.server:
            task = asyncio.ensure_future(work)
            try:
                while not (task.done() or (stop and stop.is_set()) or time.monotonic() >= until):
                    await asyncio.wait({task}, timeout=max(0, min(STOP_LOOK_SECONDS, until - time.monotonic())))
            finally:
                await _end(task, LAST_SECONDS)
            try:
                return task.result()
            except asyncio.CancelledError:
                if stop and stop.is_set():
                    raise InterruptedRunError(f"The run on {job.server.name} was interrupted.") from None
                raise RunFailedError(f"{job.out_of_time} ({timeout:g} s).") from None

    return asyncio.run(within_time())


async def _end(task: asyncio.Task[Any], seconds: float) -> None:
    """Cancel a task until it is done, every `seconds`."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=seconds)


class _ServerRun:
    """The run of one workflow on a server."""

    def __init__(
        self, server: Server, guard: bool, patience: float = 0.0, on_progress: ProgressCallback = no_progress
    ) -> None:
        self.server, self.guard = server, guard
        self.patience = patience
        self.on_progress = on_progress
        self.prompt_id: str | None = None
        self.out_of_time = f"{server.name} did not describe its nodes in time, and nothing ran"

    async def read(self, workflow: Graph | Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
        types, named = ui_format.types_in(workflow)
        schemas = await self.server.schemas({*types, GUARD} if self.guard else types, also=named)
        graph = ui_format.graph_of(workflow, schemas)
        return replace(graph, guarded=True) if self.guard else graph, schemas

    async def upload(self, graph: Graph, schemas: Mapping[str, Schema], folder: Path) -> Graph:
        """Upload images. Returns the graph with their names on the server; images outside of the folder stay."""
        self.out_of_time = f"{self.server.name} did not accept the images in time, and nothing ran"
        there: dict[Path, str] = {}
        values: dict[str, dict[str, str]] = {}
        for node, name, _, path in input_images.images_of(graph, schemas, folder):
            if path is not None:
                try:
                    there[path] = there.get(path) or await self.server.upload(path.name, input_images.read(path))
                except WorkflowError as error:
                    raise WorkflowError(f"{error} Nothing ran.") from None
                except NoAnswerError as error:
                    reason = f"{path}: {error.reason}"
                    raise HostError(f"{self.server.name} did not accept the image {reason}. Nothing ran.") from error
                values.setdefault(node.id, {})[name] = there[path]
        return graph.with_inputs(values)

    async def until_done(self, graph: Graph) -> HistoryEntry:
        """Run the graph and return its history entry. After an error, the time limit or Ctrl-C, the run is removed
        from the server."""
        self.out_of_time = f"{self.server.name} did not accept the workflow in time"
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # that no node runs any more
        listening = asyncio.ensure_future(self._listen(graph, connected))
        try:
            await asyncio.wait({listening, connected}, timeout=CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            submitted = await self.server.submit(graph)
            self.prompt_id = submitted.prompt_id
            if submitted.node_errors:
                raise WorkflowError(submitted.refusal(graph))
            self.out_of_time = "The run did not finish in time and was interrupted"
            entry = await self._follow(str(self.prompt_id), listening)
            if connected.done():  # a short run may end before its progress is read
                await asyncio.wait({listening, self._told}, timeout=TOLD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self._cancel(listening)
            raise
        await _end(listening, CANCEL_SECONDS)
        try:
            failure = entry.failure(graph, self.server.name)
        except Unreadable as error:
            raise RunFailedError(f"{self.server.name} reports a failed run in an unknown format: {error}.") from None
        if failure:
            raise failure
        return entry

    async def _follow(self, prompt_id: str, listening: asyncio.Task[None]) -> HistoryEntry:
        """Poll the history until it contains the run. A busy server may take any time, an unreachable one only
        `patience`. Raises errors of on_progress."""
        known, looks, lost_since = True, 0, None
        while True:
            looks += 1
            try:
                if entry := await self.server.result(prompt_id):
                    return entry
                if not known:
                    raise ServerLostError(
                        f"{self.server.name} no longer knows the run {prompt_id}: it was removed from the queue, or "
                        "ComfyUI was restarted. Run it again."
                    )
                if lost_since or looks % QUEUE_LOOKS == 0:  # a run that ends meanwhile is in the history next time
                    known = await self.server.has(prompt_id)
                lost_since = None
            except TooLongError as error:  # of the history, which has only finished runs
                raise RunFailedError(
                    f"The run is done: look into the output folder of {self.server.name}. Its record cannot be read, "
                    f"as when the workflow contains large images. {error}"
                ) from error
            except HostError as error:
                busy = isinstance(error, NoAnswerError) and error.busy
                lost_since = None if busy else lost_since or time.monotonic()
                if lost_since and time.monotonic() - lost_since > self.patience:
                    raise ServerLostError(
                        f"{self.server.name} no longer answers. ComfyUI may have run out of memory: look at its log. "
                        f"{error}"
                    ) from error
            await asyncio.wait({listening}, timeout=POLL_SECONDS)
            if listening.done():
                listening.result()

    async def _listen(self, graph: Graph, connected: asyncio.Future[None]) -> None:
        """Report progress, reconnecting as needed. Drops events of other runs, once the run's id is known, and those
        that come too fast."""
        node, second, told = "", 0, 0
        while True:
            with suppress(aiohttp.ClientError, asyncio.TimeoutError, HeadlessError):
                async with self.server.events() as socket:
                    if not connected.done():
                        connected.set_result(None)
                    async for message in socket:  # previews, which are binary, are dropped
                        await asyncio.sleep(0)  # a flood of events leaves the others their turn
                        if message.type is not aiohttp.WSMsgType.TEXT or len(message.data) > EVENT_CHARACTERS:
                            continue
                        found = event(message.data)
                        if found is None or (self.prompt_id and found.data.prompt_id not in (None, self.prompt_id)):
                            continue
                        if found.type == "executing" and found.data.node is None and not self._told.done():
                            self._told.set_result(None)
                        node = found.data.node or ("" if found.type == "executing" else node)
                        now = int(time.monotonic())
                        second, told = now, told + 1 if now == second else 1
                        if node and told <= PROGRESS_A_SECOND:
                            self.on_progress(RunProgress(label(graph, node), found.data.value, found.data.max))
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _cancel(self, listening: asyncio.Task[None]) -> None:
        """Remove the run from the server, within CANCEL_SECONDS, even if this task is cancelled meanwhile."""
        taking = asyncio.ensure_future(self._take_back(listening))
        while not taking.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({taking})

    async def _take_back(self, listening: asyncio.Task[None]) -> None:
        await _end(listening, 1.0)  # a flood of events would leave no time for it
        try:
            await asyncio.wait_for(self.server.cancel(self.prompt_id), CANCEL_SECONDS)
        except (asyncio.TimeoutError, HeadlessError) as error:
            logger.warning("%s did not accept the interrupt: the run may go on there. %s", self.server.name, error)
            self.out_of_time = "The run did not finish in time"

    async def download(self, outputs: Mapping[str, Mapping[str, Any]], output_dir: Path, tag: str) -> list[Path]:
        """Download all listed files, without the tag in their names."""
        self.out_of_time = f"The run is done, but {self.server.name} did not send all of its files in time"
        entries = [entry for ui in outputs.values() for entry in file_entries(ui)]
        if len(entries) > MAX_FILES:
            raise RunFailedError(
                f"{self.server.name} lists {len(entries):,} files of this run, more than {MAX_FILES:,}."
            )
        files = []
        for entry in entries:
            kept = replace(entry, filename=entry.filename.replace(tag, "", 1))
            with arriving(kept.folder_in(output_dir), kept.filename) as file:
                await self.server.download(entry, file)
            files.append(file.path)
        return files
