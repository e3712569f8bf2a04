"""A running ComfyUI's HTTP API, old (0.0.1, 2024) and new: submit, ask, cancel, upload and download.

Requests follow no redirects, and are limited in time and size, whatever the server does. Compressed answers are
refused: a few kilobytes may unpack to gigabytes.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from ...trust import foreign, paths
from ...trust.message import for_terminal, shown, without_password
from ..errors import (
    HostError,
    NoAnswerError,
    OutputError,
    RunFailedError,
    ServerLostError,
    TooLongError,
    UnknownNodesError,
    WorkflowError,
)
from ..files import Arriving, FileEntry
from ..workflow.graph import Graph
from ..workflow.schema import Schema, from_object_info
from .answers import HistoryEntry, Queue, Submitted, Uploaded

CONNECT_SECONDS = 10.0
STALL_SECONDS = 120.0  # without a byte; a ComfyUI that compiles a model is silent for a while
REQUEST_SECONDS = 300.0  # for a request and its whole answer
UPLOAD_SECONDS = 900.0
DOWNLOAD_SECONDS = 6 * 3600.0  # per file
SLOWEST = 1000  # lowest speed of a download after STALL_SECONDS, in bytes per second
CLOSE_SECONDS = 1.0
ANSWER_BYTES = 20 * 2**20  # most bytes of JSON: a history entry contains its workflow twice
ANSWER_VALUES = 800_000  # most values in it
EVENT_BYTES = 8 * 2**20  # previews are events too
CHUNK_BYTES = 2**18
MAX_FILE_BYTES = 16 * 2**30  # of one result
FREE_BYTES = 2**28  # disk space that results leave free
DOWNLOADS = 3  # attempts for a file whose download breaks off
PAUSE_SECONDS = 1.0  # before each further attempt
T = TypeVar("T")


@dataclass(frozen=True)
class HttpResponse:
    place: str  # whose answer it is, for messages
    status: int
    data: bytes = field(repr=False)

    def fitting(self, kind: type[T]) -> T:
        """Parse the answer as `kind`, a model. Raises HostError if it is not ComfyUI's JSON, and TooLongError."""
        check_size(self.place, values=foreign.values_in(self.data))
        with self.of_comfyui():
            return foreign.fitting(kind, foreign.parse(self.data, nan=True))

    @contextmanager
    def of_comfyui(self) -> Iterator[None]:
        """Turn a parsing error of the block into HostError."""
        try:
            yield
        except (foreign.Unreadable, paths.Outside) as error:
            raise HostError(f"{self.place} does not answer like ComfyUI: {error}.") from None


class Server:
    """A connection to one ComfyUI, inside an `async with`. Every request may raise HostError, and its NoAnswerError if
    nothing answers or the connection breaks."""

    def __init__(self, url: str) -> None:
        self.url = _address(url if "://" in url else f"http://{url}")
        self.name = shown(without_password(str(self.url)), 200)  # for messages
        self.client_id = uuid.uuid4().hex

    async def __aenter__(self) -> Server:
        self._session = self._new_session()
        return self

    async def __aexit__(self, *_error: object) -> None:
        closing = asyncio.ensure_future(self._session.close())
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)  # else it waits for unsent data

    async def schemas(self, types: Iterable[str], also: Iterable[str] = ()) -> dict[str, Schema]:
        """Return the schemas of these node types, and those of `also` that the server has. Raises UnknownNodesError if
        it lacks some of `types`."""
        needed, found, values, together = sorted(set(types)), dict[str, Schema](), 0, list[bytearray]()
        asked = [name for name in sorted({*needed, *also}) if name.strip(".")]  # a URL path cannot consist of dots
        answers = await asyncio.gather(*(self._get("object_info", name, together=together) for name in asked))
        for name, answer in zip(asked, answers, strict=True):
            values += foreign.values_in(answer.data)
            check_size(answer.place, values=values)
            node_types = answer.fitting(dict[str, Any])
            if name in node_types:
                with answer.of_comfyui():
                    found[name] = from_object_info(name, node_types[name])
        if unknown := [name for name in needed if name not in found]:
            raise UnknownNodesError(
                f"The ComfyUI at {self.name} has no node type {', '.join(map(shown, unknown))}. Install its pack "
                "there; if it is installed, look for 'IMPORT FAILED' in ComfyUI's log. If only the browser has it, "
                "like labels, run the file that Workflow > Export (API) writes."
            )
        return found

    async def submit(self, graph: Graph) -> Submitted:
        """Queue a workflow. The answer has a prompt_id; if it has node_errors too, some outputs are left out. Raises
        WorkflowError if the server refuses all outputs."""
        extra: dict[str, Any] = {"onediff_guard": True} if graph.guarded else {}
        if graph.workflow is not None:
            extra["extra_pnginfo"] = {"workflow": graph.workflow}
        body = {"prompt": graph.to_api(), "client_id": self.client_id} | ({"extra_data": extra} if extra else {})
        answer = await self._ask("POST", "prompt", json=body)
        said = shown(answer.data[:4000].decode(errors="replace"), 1000)
        if answer.status == 400:
            try:
                raise WorkflowError(answer.fitting(Submitted).refusal(graph))
            except HostError:
                raise WorkflowError(f"ComfyUI refuses the workflow:\n  {said}") from None
        if answer.status != 200:
            raise RunFailedError(f"{self.name} refused the workflow with HTTP {answer.status}: {said}")
        submitted = answer.fitting(Submitted)
        if submitted.prompt_id is None:
            raise HostError(f"{answer.place} does not answer like ComfyUI: its answer has no prompt_id.")
        return submitted

    async def result(self, prompt_id: str) -> HistoryEntry | None:
        """Return a prompt's history entry; None while it is not done, or if the server does not know it."""
        answer = await self._get("history", prompt_id)
        found = answer.fitting(dict[str, Any]).get(prompt_id)
        with answer.of_comfyui():
            return None if found is None else foreign.fitting(HistoryEntry, found)

    async def has(self, prompt_id: str) -> bool:
        """Return whether a prompt runs or waits. A shared server's queue may contain hundreds of whole workflows: if it
        is too long to read, assume so."""
        try:
            return (await self._queue()).has(prompt_id)
        except TooLongError:
            return True

    async def cancel(self, prompt_id: str | None) -> None:
        """Remove a prompt from the queue, or interrupt it if it runs; other clients' prompts stay.

        prompt_id: None if the server's answer to its submission was lost.
        """
        found = prompt_id or (await self._queue()).prompt_of(self.client_id)
        if not found:
            return
        asked = await self._ask("POST", "api", "jobs", found, "cancel")  # since 0.26: does both
        if asked.status != 200:
            await self._ask("POST", "queue", json={"delete": [found]})  # does not stop a running prompt
            if (await self._queue()).runs(found):
                await self._ask("POST", "interrupt", json={"prompt_id": found})

    async def upload(self, name: str, image: bytes) -> str:
        """Upload an image to the server's input folder. Returns its name there. Raises WorkflowError if the server
        refuses it."""
        form = aiohttp.FormData(quote_fields=False)  # names in UTF-8, as the page sends them
        form.add_field("image", image, filename=for_terminal(name))
        answer = await self._ask("POST", "upload", "image", seconds=UPLOAD_SECONDS, data=form)
        if answer.status != 200:
            raise WorkflowError(f"{self.name} refused the image {name}: HTTP {answer.status}.")
        with answer.of_comfyui():
            return answer.fitting(Uploaded).path

    async def download(self, entry: FileEntry, into: Arriving) -> None:
        """Fetch a result file, again where the connection breaks. Raises RunFailedError where the server does not hand
        it out, ServerLostError where not whole, OutputError where it is too large for the disk."""
        for attempt in range(1, DOWNLOADS + 1):
            try:
                return await self._fetch(entry, into)
            except NoAnswerError as error:  # noqa: PERF203
                if attempt == DOWNLOADS:
                    raise ServerLostError(
                        f"{self.name} did not send its result {shown(entry.path, 200)} completely in {DOWNLOADS} "
                        f"tries ({into.size:,} bytes; {error.reason}). The run is done: look into its output folder."
                    ) from error
                into.start_again()
                await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def alive(self, seconds: float) -> bool:
        """Return whether the server answers in time. Its answer is short, unlike its queue."""
        try:
            return (await self._ask("GET", "prompt", seconds=seconds)).status == 200
        except HostError:
            return False

    @asynccontextmanager
    async def events(self) -> AsyncGenerator[aiohttp.ClientWebSocketResponse[bool]]:
        """Yield the websocket, with aiohttp's own errors. It is closed with its session, without a closing handshake,
        which would read all that the server has sent by then."""
        async with self._new_session() as session:
            yield await session.ws_connect(
                self.url.joinpath("ws").with_query(clientId=self.client_id), max_msg_size=EVENT_BYTES
            )

    async def _fetch(self, entry: FileEntry, into: Arriving) -> None:
        query = {"filename": entry.filename, "subfolder": entry.subfolder, "type": entry.type}
        name = shown(entry.path, 200)
        async with self._request("GET", "view", seconds=DOWNLOAD_SECONDS, params=query) as (_, response):
            if response.status == 500:
                raise aiohttp.ClientError(f"HTTP {response.status}")
            if response.status != 200:
                raise RunFailedError(f"{self.name} refuses to send its result {name}: HTTP {response.status}.")
            length = response.content_length
            if length is None and "Transfer-Encoding" not in response.headers:
                raise RunFailedError(f"{self.name} does not state the length of its result {name}.")
            room = max(0, shutil.disk_usage(into.folder).free - FREE_BYTES)
            self._check_room(name, length or 0, room)
            began = time.monotonic()
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                seconds = time.monotonic() - began
                if seconds > STALL_SECONDS + into.size / SLOWEST:
                    raise asyncio.TimeoutError(f"{into.size} bytes in {seconds:.0f} s")
                self._check_room(name, into.size + len(chunk), room)
                into.write(chunk)
            if length not in (None, into.size):
                raise aiohttp.ClientPayloadError(f"{into.size:,} of {length:,} bytes")

    def _check_room(self, name: str, size: int, room: int) -> None:
        if size > MAX_FILE_BYTES:
            raise RunFailedError(
                f"{self.name} sends more than {MAX_FILE_BYTES:,} bytes as {name}. The file was discarded."
            )
        if size > room:
            raise OutputError(
                f"The result {name} does not fit the disk ({size:,} bytes or more; {room:,} are free, and "
                f"{FREE_BYTES:,} must stay free). Free some space, or choose another folder with --out."
            )

    async def _queue(self) -> Queue:
        return (await self._get("queue")).fitting(Queue)

    async def _get(self, *parts: str, together: list[bytearray] | None = None) -> HttpResponse:
        answer = await self._ask("GET", *parts, together=together)
        if answer.status != 200:
            raise HostError(f"{answer.place} answers HTTP {answer.status}: is {self.name} a ComfyUI?")
        return answer

    async def _ask(
        self,
        method: str,
        *parts: str,
        seconds: float = REQUEST_SECONDS,
        together: list[bytearray] | None = None,
        **body: Any,
    ) -> HttpResponse:
        """Request and read an answer. together: answers that share one size limit. body: aiohttp's `json=` or
        `data=`."""
        data = bytearray()
        together = [] if together is None else together
        together.append(data)
        async with self._request(method, *parts, seconds=seconds, **body) as (place, response):
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                data += chunk
                check_size(place, sum(map(len, together)))
            return HttpResponse(place, response.status, bytes(data))

    @asynccontextmanager
    async def _request(
        self, method: str, *parts: str, seconds: float, **options: Any
    ) -> AsyncGenerator[tuple[str, aiohttp.ClientResponse]]:
        """Yield the address for messages, and the response. The connection is closed if the block raises."""
        address = self.url.joinpath(*(part.replace("/", "%2F") for part in parts))
        place = "/".join((self.name.rstrip("/"), *map(shown, parts)))
        try:
            async with self._session.request(method, address, timeout=_times(seconds), **options) as response:
                try:
                    if response.status > 500:  # a proxy's answer: ComfyUI itself uses 500 only
                        raise aiohttp.ClientError(f"HTTP {response.status}")
                    packed = response.headers.get("Content-Encoding", "identity").lower()
                    if packed != "identity":
                        raise HostError(f"{place} answers in an encoding that was not requested ({shown(packed)}).")
                    yield place, response
                except BaseException:
                    response.close()
                    raise
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            busy = isinstance(error, aiohttp.SocketTimeoutError)
            raise NoAnswerError(self.name, _reason(error), busy=busy) from error

    def _new_session(self) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(self._on_redirect)
        return aiohttp.ClientSession(
            timeout=_times(REQUEST_SECONDS),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[tracing],
        )

    async def _on_redirect(self, _session: object, _context: object, told: aiohttp.TraceRequestRedirectParams) -> None:
        """Refuse a redirect: it would send workflow, images and password to another address."""
        location = told.response.headers.get("Location", "nowhere")
        told.response.close()
        raise HostError(
            f"{self.name} redirects to {shown(without_password(location), 200)}, which is not followed: give --server "
            "the final address."
        )


def check_size(place: str, size: int = 0, values: int = 0) -> None:
    """Raise TooLongError if an answer has too many bytes or JSON values."""
    for number, most, what in ((size, ANSWER_BYTES, "bytes"), (values, ANSWER_VALUES, "values")):
        if number > most:
            raise TooLongError(f"{place} answers with more than {most:,} {what}: is this a ComfyUI?")


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return shown(error.os_error.strerror or error.os_error, 200)
    if isinstance(error, aiohttp.ClientResponseError):  # its own text contains the address with the password
        return shown(f"{error.status} {error.message}", 200)
    return shown(str(error), 200) or type(error).__name__


def _address(url: str) -> URL:
    try:
        address = URL(url).with_query(None).with_fragment(None)
        if address.scheme in ("http", "https") and address.host:
            return address
    except ValueError:
        pass
    raise WorkflowError(
        f"--server {shown(without_password(url), 200)}: expected an address like http://127.0.0.1:8188."
    )


def _times(total: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS, sock_read=STALL_SECONDS)
