"""A running ComfyUI's HTTP API, old (0.0.1, 2024) and new: submit, ask, cancel, upload and download."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ...trust import foreign, paths
from ...trust.text import for_terminal, shown
from ..errors import HostError, OutputError, RunFailedError, TooLongError, UnknownNodesError, WorkflowError
from ..files import Arriving, FileEntry
from ..workflow.graph import Graph
from ..workflow.schema import Schema, from_object_info
from . import wire
from .answers import FIRST_RUNNING, HistoryEntry, Queue, Submitted, Uploaded
from .wire import Allowance, Answer, Wire, reason

MAX_FILE_BYTES = 16 * 2**30  # of one result
FREE_BYTES = 2**28  # of the disk's, that results leave
DOWNLOADS = 3  # tries for a file whose download breaks off
PAUSE_SECONDS = 1.0  # before each of them but the first


@dataclass(frozen=True)
class Taken:
    """A workflow that is queued."""

    prompt_id: str
    refusal: str | None  # why some of its outputs are left out


@dataclass(frozen=True)
class Place:
    """Where a prompt stands on the server."""

    state: str  # "pending", "running", "done", "gone", or "waiting": in a queue too long to be read
    entry: HistoryEntry | None = None  # once it is done


class Server(Wire):
    """One ComfyUI, for the length of an `async with`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.client_id = uuid.uuid4().hex

    async def schemas(self, types: Iterable[str]) -> dict[str, Schema]:
        """The schemas of these node types.

        Raises:
            HostError: nothing answers, or it isn't ComfyUI.
            UnknownNodesError: the server lacks some of them.
        """
        names = sorted(set(types))
        together = Allowance()
        found = await asyncio.gather(*(self._schema(name, together) for name in names))
        unknown = [shown(name) for name, schema in zip(names, found, strict=True) if not schema]
        if unknown:
            raise UnknownNodesError(
                f"The ComfyUI at {self.name} has no node type {', '.join(unknown)}. Install the pack that brings it "
                "there, and look for 'IMPORT FAILED' in its log if it is installed. If only the browser has it, "
                "as with labels: run what Workflow > Export (API) writes."
            )
        return {name: schema for name, schema in zip(names, found, strict=True) if schema is not None}

    async def submit(self, graph: Graph) -> Taken:
        """Queue a workflow.

        Raises:
            WorkflowError: the server found faults in all of it.
        """
        body: dict[str, Any] = {"prompt": graph.to_api(), "client_id": self.client_id}
        if graph.workflow is not None:
            body["extra_data"] = {"extra_pnginfo": {"workflow": graph.workflow}}
        answer = await self.post("prompt", json=body)
        if answer.status == 400:
            try:
                raise WorkflowError(answer.fitting(Submitted).refusal(graph))
            except HostError:
                raise WorkflowError(f"ComfyUI refuses the workflow:\n  {answer.text(1000)}") from None
        if answer.status != 200:
            raise RunFailedError(f"{self.name} refused the workflow with HTTP {answer.status}: {answer.text()}")
        submitted = answer.fitting(Submitted)
        if submitted.prompt_id is None:
            raise HostError(f"{answer.place} does not answer as ComfyUI does: it gave the run no prompt_id.")
        return Taken(submitted.prompt_id, submitted.refusal(graph) if submitted.node_errors else None)

    async def place(self, prompt_id: str) -> Place:
        """Where a prompt stands. One that ends between the two questions looks gone, until asked about again."""
        history = await self._get("history", prompt_id)
        found = history.fitting(dict[str, Any]).get(prompt_id)
        try:
            if found is not None:
                return Place("done", foreign.fitting(HistoryEntry, found))
        except foreign.Unreadable as error:
            raise HostError(f"{history.place} does not tell what came of the run as ComfyUI does: {error}.") from None
        state, _ = await self._in_queue(prompt_id)  # all prompts in full, so it comes second
        return Place(state)

    async def cancel(self, prompt_id: str | None) -> None:
        """Take a prompt out of the queue, or interrupt it if it runs; other people's prompts stay.

        prompt_id: None where the server took it, and its answer was lost.
        """
        found = prompt_id or (await self._in_queue(None))[1]
        if not found:
            return
        asked = await self.post("api", "jobs", found, "cancel")  # since 0.26: whichever it is, in one
        if asked.status != 200:
            await self.post("queue", json={"delete": [found]})  # which leaves one that runs
            if (await self._in_queue(found))[0] == "running":
                await self.post("interrupt", json={"prompt_id": found})

    async def upload(self, name: str, image: bytes) -> str:
        """Put an image into the server's input folder; the name that it has there.

        Raises:
            WorkflowError: the server does not take it.
        """
        form = aiohttp.FormData(quote_fields=False)  # names in UTF-8, as the page sends them
        form.add_field("image", image, filename=for_terminal(name))
        answer = await self.post("upload", "image", seconds=wire.UPLOAD_SECONDS, data=form)
        if answer.status != 200:
            raise WorkflowError(f"{self.name} did not take the image {name}: HTTP {answer.status}.")
        try:
            return answer.fitting(Uploaded).path
        except paths.Outside as fault:
            raise HostError(f"{answer.place} has no such name for the image {name}: {fault}.") from None

    async def download(self, entry: FileEntry, into: Arriving, folder: Path) -> None:
        """Fetch a result file, again where the connection breaks.

        folder: that it lands in.

        Raises:
            RunFailedError: the server does not hand it out, or not whole.
            OutputError: it is too large for the disk.
        """
        for attempt in range(1, DOWNLOADS + 1):
            try:
                return await self._fetch(entry, into, folder)
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:  # noqa: PERF203
                if attempt == DOWNLOADS:
                    raise RunFailedError(
                        f"{self.name} broke off its result {shown(entry.path, 200)} after {into.size:,} bytes, "
                        f"{DOWNLOADS} times ({reason(error)}). The run is done: look into its output folder."
                    ) from error
                into.start_again()
                await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def _fetch(self, entry: FileEntry, into: Arriving, folder: Path) -> None:
        query = {"filename": entry.filename, "subfolder": entry.subfolder, "type": entry.type}
        name = shown(entry.path, 200)
        async with self.file("view", **query) as body:
            if body.status >= 500:
                raise aiohttp.ClientError(f"HTTP {body.status}")
            if body.status != 200:
                raise RunFailedError(f"{self.name} does not hand out its result {name}: HTTP {body.status}.")
            if not body.whole_is_known:
                raise RunFailedError(f"{self.name} does not say how long its result {name} is.")
            room = max(0, shutil.disk_usage(folder).free - FREE_BYTES)
            self._check_size(name, body.length or 0, room)
            async for chunk in body.chunks():
                self._check_size(name, into.size + len(chunk), room)
                into.write(chunk)
            if body.length not in (None, into.size):
                raise aiohttp.ClientPayloadError(f"{into.size:,} of {body.length:,} bytes")

    def _check_size(self, name: str, size: int, room: int) -> None:
        if size > MAX_FILE_BYTES:
            raise RunFailedError(
                f"{self.name} hands out more than {MAX_FILE_BYTES:,} bytes as {name}. It was not kept."
            )
        if size > room:
            raise OutputError(
                f"The result {name} does not fit the disk ({size:,} bytes or more, and {room:,} are free beside "
                f"{FREE_BYTES:,} that are left alone). Free some space, or choose another folder with --out."
            )

    async def alive(self) -> bool:
        """Whether the server answers."""
        try:
            return (await self.get("queue")).status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, HostError):
            return False

    async def _schema(self, name: str, allowance: Allowance) -> Schema | None:
        if not name.strip("."):  # no part of an address
            return None
        try:
            answer = await self._get("object_info", name, allowance=allowance)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise HostError(
                f"No ComfyUI answers at {self.name} ({reason(error)}). "
                "Start it, check the address and port, or use --comfyui DIR to have one started."
            ) from error
        found = answer.fitting(dict[str, Any])
        try:
            return from_object_info(name, found[name]) if name in found else None
        except foreign.Unreadable as error:
            raise HostError(f"{answer.place} does not describe the node type as ComfyUI does: {error}.") from None

    async def _in_queue(self, prompt_id: str | None) -> tuple[str, str]:
        """As Queue.find. A shared server's queue may hold hundreds of large workflows, each in full."""
        try:
            return (await self._get("queue")).fitting(Queue).find(prompt_id, self.client_id)
        except TooLongError as error:
            first = FIRST_RUNNING.match(error.beginning)
            runs = prompt_id is not None and first is not None and first[1] == prompt_id.encode()
            return "running" if runs else "waiting", prompt_id or ""

    async def _get(self, *parts: str, allowance: Allowance | None = None) -> Answer:
        answer = await self.get(*parts, allowance=allowance)
        if answer.status != 200:
            raise HostError(f"{answer.place} answers HTTP {answer.status}: is {self.name} a ComfyUI?")
        return answer
