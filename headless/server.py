"""A running ComfyUI's HTTP API, old (0.0.1, 2024) and new: submit, ask, cancel, upload and download."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from .errors import HostError, RunFailedError, UnknownNodesError, WorkflowError
from .files import FileEntry
from .graph import Graph
from .schema import Schema, from_object_info

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 120.0  # a ComfyUI that compiles a model answers nothing for a while
CANCEL_SECONDS = 10.0


@dataclass(frozen=True)
class Place:
    """Where a prompt stands on the server."""

    state: str  # "pending", "running", "done" or "gone"
    entry: Mapping[str, Any] | None = None  # its history, once it is done


class Server:
    """One ComfyUI, for the length of an `async with`."""

    def __init__(self, url: str) -> None:
        self.url = URL(url if "://" in url else f"http://{url}").with_query(None).with_fragment(None)
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise WorkflowError(f"--server {url}: expected an address like http://127.0.0.1:8188.")
        self.client_id = uuid.uuid4().hex

    async def __aenter__(self) -> Server:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=REQUEST_SECONDS)
        self._session = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._session.close()

    def websocket(self) -> AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse[bool]]:
        """The stream of this client's events. Previews may be large, so messages have no size limit."""
        address = self._address("ws").with_query(clientId=self.client_id)
        return self._session.ws_connect(address, max_msg_size=0)

    async def schemas(self, types: Iterable[str]) -> dict[str, Schema]:
        """The schemas of these node types.

        Raises:
            HostError: nothing answers, or it isn't ComfyUI.
            UnknownNodesError: the server lacks some of them.
        """
        names = sorted(types)
        found = await asyncio.gather(*(self._first("object_info", name) for name in names))
        unknown = [name for name, info in zip(names, found, strict=True) if name not in info]
        if unknown:
            raise UnknownNodesError(
                f"The ComfyUI at {self.url} has no node type {', '.join(unknown)}. Install the pack that brings it "
                "there, and look for 'IMPORT FAILED' in its log if it is installed."
            )
        return {name: from_object_info(name, info[name]) for name, info in zip(names, found, strict=True)}

    async def submit(self, graph: Graph) -> str:
        """Queue a workflow; its prompt id.

        Raises:
            WorkflowError: the server found faults, in all of it or in some of its outputs; nothing is left queued.
        """
        body: dict[str, Any] = {"prompt": graph.to_api(), "client_id": self.client_id}
        if graph.workflow is not None:
            body["extra_data"] = {"extra_pnginfo": {"workflow": graph.workflow}}
        async with self._session.post(self._address("prompt"), json=body) as response:
            answer = await _json(response)
        if response.status == 200 and isinstance(answer.get("prompt_id"), str):
            if answer.get("node_errors"):
                await self.cancel(answer["prompt_id"])
                raise WorkflowError(_refusal(graph, answer))
            return answer["prompt_id"]
        if response.status == 400:
            raise WorkflowError(_refusal(graph, answer))
        raise RunFailedError(f"{self.url} refused the workflow with HTTP {response.status}: {str(answer)[:500]}")

    async def place(self, prompt_id: str) -> Place:
        """Where a prompt stands. One that ends between the two questions looks gone, until asked about again."""
        history = await self._get("history", prompt_id)
        if prompt_id in history:
            return Place("done", history[prompt_id])
        queue = await self._get("queue")  # all prompts in full, so it comes second
        for key, state in (("queue_running", "running"), ("queue_pending", "pending")):
            if any(prompt_id == _prompt_id(item) for item in queue.get(key, ())):
                return Place(state)
        return Place("gone")

    async def cancel(self, prompt_id: str) -> None:
        """Take a prompt out of the queue, or interrupt it if it runs; other people's prompts stay."""
        state = (await self.place(prompt_id)).state
        if state == "pending":
            async with self._session.post(self._address("queue"), json={"delete": [prompt_id]}):
                state = (await self.place(prompt_id)).state
        if state == "running":
            async with self._session.post(self._address("interrupt"), json={"prompt_id": prompt_id}):
                return

    async def upload(self, image: Path) -> str:
        """Put an image into the server's input folder; the name that it has there."""
        form = aiohttp.FormData()
        form.add_field("image", image.read_bytes(), filename=image.name)
        async with self._session.post(self._address("upload", "image"), data=form) as response:
            answer = await _json(response)
        if response.status != 200:
            raise WorkflowError(f"{self.url} did not take the image {image}: HTTP {response.status}.")
        return "/".join(part for part in (answer.get("subfolder"), answer["name"]) if part)

    async def download(self, entry: FileEntry) -> bytes:
        """A result file's bytes."""
        query = {"filename": entry.filename, "subfolder": entry.subfolder, "type": entry.type}
        async with self._session.get(self._address("view").with_query(query)) as response:
            if response.status != 200:
                name = f"{entry.subfolder}/{entry.filename}".lstrip("/")
                raise RunFailedError(f"{self.url} does not hand out its result {name}: HTTP {response.status}.")
            return await response.read()

    async def alive(self) -> bool:
        """Whether the server answers."""
        try:
            async with self._session.get(self._address("queue")) as response:
                return response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False

    async def _first(self, *parts: str) -> dict[str, Any]:
        """Like `_get`, for the first request, where a failure means that no ComfyUI is there."""
        try:
            return await self._get(*parts)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise HostError(
                f"No ComfyUI answers at {self.url} ({_reason(error)}). "
                "Start it, check the address and port, or use --comfyui DIR to have one started."
            ) from error

    async def _get(self, *parts: str) -> dict[str, Any]:
        async with self._session.get(self._address(*parts)) as response:
            answer = await _json(response)
        if response.status != 200:
            raise HostError(f"{response.url} answers HTTP {response.status}: is {self.url} a ComfyUI?")
        return answer

    def _address(self, *parts: str) -> URL:
        return self.url.joinpath(*(part.replace("/", "%2F") for part in parts))


async def _json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    text = await response.text(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    if response.status == 200:
        raise HostError(f"{response.url} does not answer with JSON: is this a ComfyUI?")
    return {"error": text}


def _prompt_id(item: Any) -> Any:
    """Of a queue's entry: (priority, id, …) in ComfyUI, a dictionary in its pip-installable fork."""
    return item.get("prompt_id") if isinstance(item, dict) else item[1]


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


def _refusal(graph: Graph, answer: Mapping[str, Any]) -> str:
    """ComfyUI's validation errors in words, one line each."""
    lines = []
    for node_id, fault in (answer.get("node_errors") or {}).items():
        node = graph.nodes.get(str(node_id))
        label = node.label if node else f"node {node_id}"
        lines += [f"{label}: {e.get('message')}: {e.get('details')}" for e in fault.get("errors") or ()]
    if not lines:
        error = answer.get("error")
        parts = [error.get("message"), error.get("details")] if isinstance(error, dict) else [error]
        lines = [" ".join(str(part) for part in parts if part)]
    return "ComfyUI refuses the workflow:\n" + "\n".join(f"  {line}" for line in lines)
