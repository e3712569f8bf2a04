"""A ComfyUI on a real socket that tells the truth, but for one of its answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from at_once import HANG_SECONDS

Lie = Callable[["Connection"], Awaitable[None]]

PICTURE = b"\x89PNG whole"
PROMPT_ID = "11111111-2222-3333-4444-555555555555"
ENTRY = {
    "outputs": {"2": {"images": [{"filename": "a_00001_.png", "subfolder": "", "type": "output"}]}},
    "status": {"status_str": "success", "completed": True, "messages": [["execution_success", {}]]},
}
OBJECT_INFO = {
    "LoadImage": {"input": {"required": {"image": [["a.png"], {"image_upload": True}]}}, "output": ["IMAGE"]},
    "SaveImage": {"input": {"required": {"images": ["IMAGE"], "filename_prefix": ["STRING", {}]}}, "output_node": True},
}
WORKFLOW = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "a"}},
}
UNFINISHED = ("prompt", "history", "queue")  # a lie there meets a run that goes on until it is interrupted


class Connection:
    """One request, and what may be written to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, headers: dict[str, str]):
        self.reader, self.writer, self.path, self.headers = reader, writer, path, headers

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, status: str = "200 OK", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def upgrade(self) -> None:
        key = (self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
        accept = base64.b64encode(hashlib.sha1(key).digest()).decode()
        lines = [
            "HTTP/1.1 101 Switching",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {accept}",
        ]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def frame(self, data: bytes, opcode: int = 1, last: bool = True) -> None:
        head = bytes([opcode | (128 if last else 0)])
        size = bytes([len(data)]) if len(data) < 126 else bytes([127]) + len(data).to_bytes(8, "big")
        await self.send(head + size + data)


class LyingServer:
    """`endpoint`: whose answers are the lie's; `deaf`: which reads no body. A context manager."""

    def __init__(self, endpoint: str = "", lie: Lie | None = None, deaf: bool = False) -> None:
        self.endpoint, self.lie, self.deaf = endpoint, lie, deaf
        self.posted: list[str] = []
        self.queued: list[Any] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> LyingServer:
        self._thread.start()
        assert self._ready.wait(HANG_SECONDS)
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks)) if tasks else None
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._request(reader, writer)
        with suppress(OSError, RuntimeError):
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, _ = (await reader.readline()).decode().split(" ", 2)
        headers: dict[str, str] = {}
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        path = target.partition("?")[0].strip("/")
        if self.deaf and path.startswith(self.endpoint):
            await asyncio.sleep(1000)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size + 2)
            await reader.readline()
        connection = Connection(reader, writer, path, headers)
        endpoint = path.split("/")[0]
        if method == "POST":
            self.posted.append(path)
            if endpoint == "prompt":
                self.queued = [[0, PROMPT_ID, {}, {"client_id": json.loads(body)["client_id"]}, []]]
            elif endpoint == "interrupt":
                self.queued = []
        if endpoint == self.endpoint and self.lie and (method == "GET" or endpoint in ("prompt", "upload")):
            await self.lie(connection)
        else:
            await self._truth(connection, endpoint)

    async def _truth(self, connection: Connection, endpoint: str) -> None:
        done = self.endpoint not in UNFINISHED
        if endpoint == "ws":
            await connection.upgrade()
            await connection.frame(json.dumps({"type": "status", "data": {"sid": "x"}}).encode())
            await connection.reader.read()
            return
        if endpoint == "view":
            await connection.answer(PICTURE)
            return
        name = connection.path.rpartition("/")[2]
        answers: dict[str, Any] = {
            "object_info": {name: OBJECT_INFO.get(name)},
            "upload": {"name": "a.png", "subfolder": "", "type": "input"},
            "prompt": {"prompt_id": PROMPT_ID, "number": 1, "node_errors": {}},
            "history": {PROMPT_ID: ENTRY} if done else {},
            "queue": {"queue_running": self.queued, "queue_pending": []},
            "interrupt": {},
        }
        status = "200 OK" if endpoint in answers else "404 Not Found"  # "api" too: a ComfyUI before 0.26
        await connection.answer(json.dumps(answers.get(endpoint, {})).encode(), status)
