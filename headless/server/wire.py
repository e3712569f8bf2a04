"""Requests to one server: never redirected, and bounded in time and in size, whatever the server does.

An answer is taken as it is, never unpacked: a few compressed kilobytes may hold gigabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from yarl import URL

from ...trust import foreign
from ...trust.text import shown, without_password
from ..errors import HostError, TooLongError, WorkflowError

if TYPE_CHECKING:
    from typing_extensions import Self

CONNECT_SECONDS = 10.0
STALL_SECONDS = 120.0  # without a byte; a ComfyUI that compiles a model answers nothing for a while
REQUEST_SECONDS = 300.0  # for a request and the whole of its answer, files apart
UPLOAD_SECONDS = 900.0
CLOSE_SECONDS = 1.0
MIN_PROGRESS = 16 * 2**10  # bytes of a file in each STALL_SECONDS
ANSWER_BYTES = 20 * 2**20  # of JSON: an entry of the history has its workflow twice
ANSWER_VALUES = 800_000  # in it
EVENT_BYTES = 8 * 2**20  # previews are events too
CHUNK_BYTES = 2**18
BEGINNING_BYTES = 2**12  # of an answer that is too long
T = TypeVar("T")


@dataclass
class Allowance:
    """How much JSON is taken, in one answer or in several together."""

    bytes: int = ANSWER_BYTES
    values: int = ANSWER_VALUES


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    place: str  # whose answer it is, for messages
    status: int
    data: bytes = field(repr=False)
    allowance: Allowance = field(default_factory=Allowance, repr=False)

    def fitting(self, kind: type[T]) -> T:
        """The answer as `kind`, a model. Raises HostError: it is no JSON, or none of ComfyUI's; TooLongError."""
        self.allowance.values -= foreign.values_in(self.data)
        if self.allowance.values < 0:
            raise TooLongError(
                f"{self.place} answers with more than {ANSWER_VALUES:,} values: is this a ComfyUI?",
                self.data[:BEGINNING_BYTES],
            )
        try:
            return foreign.fitting(kind, foreign.parse(self.data, nan=True))
        except foreign.Unreadable as error:
            raise HostError(f"{self.place} does not answer as ComfyUI does: {error}.") from None

    def text(self, limit: int = 300) -> str:
        """Its beginning, for messages."""
        return shown(self.data[: 4 * limit].decode(errors="replace"), limit)


class Wire:
    """The connection to one server, for the length of an `async with`. Raises aiohttp's errors, TimeoutError and
    HostError."""

    def __init__(self, url: str) -> None:
        self.url = _address(url if "://" in url else f"http://{url}")
        self.name = shown(without_password(str(self.url)), 200)  # for messages

    async def __aenter__(self) -> Self:
        self._session = self._new_session()
        return self

    async def __aexit__(self, *_error: object) -> None:
        closing = asyncio.ensure_future(self._session.close())
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)  # it waits for what was not sent, of whoever takes nothing

    async def get(self, *parts: str, allowance: Allowance | None = None) -> Answer:
        return await self._ask("GET", parts, allowance)

    async def post(self, *parts: str, seconds: float = REQUEST_SECONDS, **body: Any) -> Answer:
        """body: `json=` or `data=`, as aiohttp takes them."""
        return await self._ask("POST", parts, None, timeout=_times(seconds), **body)

    @asynccontextmanager
    async def file(self, *parts: str, **query: str) -> AsyncGenerator[Body]:
        """A file on the server, of any length."""
        timeout = _times(None)
        async with self._session.get(self._at(*parts).with_query(query), timeout=timeout) as response:
            yield Body(response, self._checked(response, parts))

    @asynccontextmanager
    async def websocket(self, **query: str) -> AsyncGenerator[aiohttp.ClientWebSocketResponse[bool]]:
        """Left without a goodbye, for which all that the server has sent by then would be read: closed with its
        session."""
        async with self._new_session() as session:
            yield await session.ws_connect(self._at("ws").with_query(query), max_msg_size=EVENT_BYTES)

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

    async def _ask(self, method: str, parts: tuple[str, ...], allowance: Allowance | None, **options: Any) -> Answer:
        allowance = allowance or Allowance()
        data = bytearray()
        async with self._session.request(method, self._at(*parts), **options) as response:
            place = self._checked(response, parts)
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                allowance.bytes -= len(chunk)
                if allowance.bytes < 0:
                    response.close()
                    raise TooLongError(
                        f"{place} answers with more than {ANSWER_BYTES:,} bytes: is this a ComfyUI?",
                        bytes(data[:BEGINNING_BYTES]),
                    )
                data += chunk
        return Answer(place, response.status, bytes(data), allowance)

    def _checked(self, response: aiohttp.ClientResponse, parts: tuple[str, ...]) -> str:
        """Whose answer this is, for messages."""
        place = "/".join((self.name.rstrip("/"), *(shown(part) for part in parts)))
        packed = response.headers.get("Content-Encoding", "identity").lower()
        if packed != "identity":
            response.close()
            raise HostError(f"{place} answers packed ({shown(packed)}), although it was asked not to.")
        return place

    async def _on_redirect(self, _session: object, _context: object, told: aiohttp.TraceRequestRedirectParams) -> None:
        """A redirect would take workflow, images and password to another address than the one that was given."""
        location = told.response.headers.get("Location", "nowhere")
        told.response.close()
        raise HostError(
            f"{self.name} redirects to {shown(without_password(location), 200)}, which is not followed: "
            "give --server the address that answers itself."
        )

    def _at(self, *parts: str) -> URL:
        return self.url.joinpath(*(part.replace("/", "%2F") for part in parts))


class Body:
    """A file's bytes as they arrive."""

    def __init__(self, response: aiohttp.ClientResponse, place: str) -> None:
        self.status = response.status
        self.place = place
        self.length = response.content_length  # in bytes, where it is known
        self.whole_is_known = self.length is not None or response.headers.get("Transfer-Encoding") is not None
        self._content = response.content

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises TimeoutError where they come by drops."""
        loop = asyncio.get_running_loop()
        since, arrived = loop.time(), 0
        async for chunk in self._content.iter_chunked(CHUNK_BYTES):
            arrived += len(chunk)
            yield chunk
            if loop.time() - since > STALL_SECONDS:
                if arrived < MIN_PROGRESS:
                    raise asyncio.TimeoutError(f"{arrived} bytes in {STALL_SECONDS:.0f} s")
                since, arrived = loop.time(), 0


def reason(error: BaseException) -> str:
    """Why a request failed, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return shown(error.os_error.strerror or error.os_error, 200)
    if isinstance(error, aiohttp.ClientResponseError):  # its own text has the address in it, and the password
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


def _times(total: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS, sock_read=STALL_SECONDS)
