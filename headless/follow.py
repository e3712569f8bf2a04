"""A run on a running ComfyUI, from submission to the last downloaded file.

The websocket tells about progress and that something has ended; the history is what counts. So it does not matter
how the server says that a run is over (`executing` with node null in 0.0.1, `execution_success` and its siblings
since), and a websocket that breaks costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from . import settings, ui_format
from .errors import HeadlessError, HostError, InterruptedRunError, RunFailedError
from .files import ensure_writable, file_entries, write_named
from .graph import Graph, from_api, is_ui_format
from .result import Progress, ProgressCallback, RunResult, no_progress
from .schema import Schema
from .server import CANCEL_SECONDS, Place, Server

POLL_SECONDS = 3.0  # between two looks into the history, should the websocket miss the end
RECONNECT_SECONDS = 1.0
PATIENCE_SECONDS = 60.0  # how long a server may be out of reach in the middle of a run
SETTLE_SECONDS = 0.1  # between a run's last event and its entry in the history
END_EVENTS = frozenset({"execution_success", "execution_error", "execution_interrupted"})
IMAGE_LOADERS = frozenset({"LoadImage", "LoadImageMask"})


def run_on_server(
    workflow: Graph | Mapping[str, Any],
    *,
    url: str,
    output_dir: Path,
    input_dir: Path | None = None,
    changes: Sequence[settings.Setting] = (),
    timeout: float | None = None,
    patience: float = PATIENCE_SECONDS,
    on_progress: ProgressCallback = no_progress,
) -> RunResult:
    """Run a workflow on a running ComfyUI and download what it saved.

    Args:
        workflow: a graph, or a workflow's JSON in API or UI format.
        url: the server's address.
        output_dir: where results go; made if it isn't there.
        input_dir: images that LoadImage names and that are in here are uploaded first.
        changes: inputs to set first.
        timeout: seconds after which the run is interrupted.
        patience: seconds that the server may be out of reach.
        on_progress: told each node and step.

    Raises:
        HostError: no ComfyUI answers there.
        WorkflowError: the server refuses the workflow; nothing ran.
        RunFailedError: a node raised, the time was up, or the server was lost.
        InterruptedRunError: somebody interrupted the run there. Ctrl-C here interrupts it and is raised as
            KeyboardInterrupt.
        OutputError: a result could not be written.
    """

    async def run() -> RunResult:
        async with Server(url) as server:
            graph, schemas = await _read(server, workflow)
            graph = settings.apply(graph, changes, schemas)
            ensure_writable(output_dir)
            if input_dir is not None:
                graph = await _upload_images(server, graph, input_dir)
            started = time.perf_counter()
            entry = await _Run(server, graph, patience, on_progress).until_done(timeout)
            outputs = {str(key): dict(ui or {}) for key, ui in (entry.get("outputs") or {}).items()}
            files = await _download(server, outputs, output_dir)
            return RunResult(outputs, {}, files, time.perf_counter() - started)

    return asyncio.run(run())


def read_for_server(workflow: Graph | Mapping[str, Any], *, url: str) -> tuple[Graph, dict[str, Schema]]:
    """A workflow, and the schemas of its node types on a running ComfyUI.

    Raises:
        HostError: no ComfyUI answers there.
        WorkflowError: it is no workflow, or the server lacks some of its node types.
    """

    async def read() -> tuple[Graph, dict[str, Schema]]:
        async with Server(url) as server:
            return await _read(server, workflow)

    return asyncio.run(read())


async def _read(server: Server, workflow: Graph | Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
    if not isinstance(workflow, Graph) and is_ui_format(workflow):
        schemas = await server.schemas(ui_format.class_types(workflow))
        return ui_format.convert(workflow, schemas), schemas
    graph = workflow if isinstance(workflow, Graph) else from_api(workflow)
    return graph, await server.schemas(graph.class_types())


async def _upload_images(server: Server, graph: Graph, folder: Path) -> Graph:
    for node in list(graph.nodes.values()):
        name = node.inputs.get("image")
        if node.class_type in IMAGE_LOADERS and isinstance(name, str) and (folder / name).is_file():
            graph = graph.with_input(node.id, "image", await server.upload(folder / name))
    return graph


async def _download(server: Server, outputs: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    entries = [entry for ui in outputs.values() for entry in file_entries(ui) if entry.type != "input"]
    return [write_named(folder / entry.folder, entry.filename, await server.download(entry)) for entry in entries]


class _Run:
    """One submitted prompt."""

    def __init__(self, server: Server, graph: Graph, patience: float, on_progress: ProgressCallback) -> None:
        self.server = server
        self.graph = graph
        self.patience = patience
        self.on_progress = on_progress
        self.events: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.connected = asyncio.Event()
        self.node = ""  # id of the one that runs

    async def until_done(self, timeout: float | None) -> Mapping[str, Any]:
        """The run's history entry; interrupts it when the time is up or this task is cancelled (Ctrl-C)."""
        listener = asyncio.create_task(self._listen())
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.connected.wait(), RECONNECT_SECONDS * 5)
            prompt_id = await self.server.submit(self.graph)
            try:
                entry = await asyncio.wait_for(self._follow(prompt_id), timeout)
            except asyncio.TimeoutError:
                await self._cancel(prompt_id)
                raise RunFailedError(f"The run was not done after {timeout:g} s and was interrupted.") from None
            except asyncio.CancelledError:
                await self._cancel(prompt_id)
                raise
        except aiohttp.ClientError as error:
            raise HostError(f"{self.server.url} broke off the connection: {error}.") from error
        finally:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
        self._raise_if_failed(entry)
        return entry

    async def _cancel(self, prompt_id: str) -> None:
        with suppress(aiohttp.ClientError, asyncio.TimeoutError, HeadlessError):
            await asyncio.wait_for(self.server.cancel(prompt_id), CANCEL_SECONDS)

    async def _listen(self) -> None:
        """Put the websocket's events into the queue, connecting again for as long as it takes."""
        while True:
            with suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with self.server.websocket() as socket:
                    self.connected.set()
                    async for message in socket:
                        if message.type is aiohttp.WSMsgType.TEXT:
                            with suppress(ValueError):
                                self.events.put_nowait(json.loads(message.data))
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _follow(self, prompt_id: str) -> Mapping[str, Any]:
        gone = 0
        next_look = time.monotonic() + POLL_SECONDS
        while True:
            with suppress(asyncio.TimeoutError):
                event = await asyncio.wait_for(self.events.get(), max(0.0, next_look - time.monotonic()))
                if not self._is_end(event, prompt_id):
                    continue
                await asyncio.sleep(SETTLE_SECONDS)
            place = await self._patiently(lambda: self.server.place(prompt_id))
            if place.entry is not None:
                return place.entry
            next_look = time.monotonic() + POLL_SECONDS
            gone = gone + 1 if place.state == "gone" else 0
            if gone > 1:
                raise RunFailedError(
                    f"{self.server.url} no longer knows the run {prompt_id}: it was taken out of the queue, or ComfyUI "
                    "was restarted. Run it again."
                )

    def _is_end(self, event: Mapping[str, Any], prompt_id: str) -> bool:
        """Whether this event says that our run is over; tells the progress on the way."""
        data = event.get("data")
        if not isinstance(data, dict) or data.get("prompt_id", prompt_id) != prompt_id:
            return False
        kind = event.get("type")
        if kind == "executing":
            if data.get("node") is None:
                return True
            self.node = str(data["node"])
            self.on_progress(Progress(self._label(self.node)))
        elif kind == "progress":
            node = str(data.get("node") or self.node)
            self.on_progress(Progress(self._label(node), data.get("value"), data.get("max")))
        return kind in END_EVENTS

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
                    raise RunFailedError(
                        f"{self.server.url} does not answer any more ({str(error) or type(error).__name__}). "
                        "Look at its log: ComfyUI may have run out of memory."
                    ) from error
                await asyncio.sleep(RECONNECT_SECONDS)

    def _label(self, node_id: str) -> str:
        node = self.graph.nodes.get(node_id)
        return node.label if node else f"node {node_id}"

    def _raise_if_failed(self, entry: Mapping[str, Any]) -> None:
        status = entry.get("status") or {}
        given = status.get("messages") or ()
        messages = dict(message for message in given if not isinstance(message, str))
        texts = [message for message in given if isinstance(message, str)]  # ComfyUI's pip-installable fork
        if any(text.startswith("execution_interrupted") for text in texts):
            raise InterruptedRunError("The run was interrupted on the server.")
        if "execution_error" in messages:
            fault = messages["execution_error"]
            kind = str(fault.get("exception_type", "error")).removeprefix("builtins.")
            message = str(fault.get("exception_message", "")).strip()
            raise RunFailedError(f"{self._label(str(fault.get('node_id')))} failed: {kind}: {message}")
        if "execution_interrupted" in messages:
            node = self._label(str(messages["execution_interrupted"].get("node_id")))
            raise InterruptedRunError(f"The run was interrupted on the server, at {node}.")
        if status.get("status_str") == "error":
            why = "; ".join(texts) or "but not why: look at its log"
            raise RunFailedError(f"{self.server.url} says that the run failed, {why}.")
