"""Whatever a server does in place of an answer: the run ends in time, in one line, and leaves nothing half-written.

The server is a ComfyUI on a real socket that tells the truth, but for one of its answers.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from at_once import HANG_SECONDS
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.errors import ExitCode
from comfyui_onediff_guard.headless.server import follow
from PIL import Image

TIMEOUT = 0.6  # seconds
HUNG = 60  # seconds after which a run is given up
MEMORY = 300  # MiB that a run may take, the server's own among them
FOREVER = 10_000
PICTURE = b"\x89PNG whole"
PROMPT_ID = "11111111-2222-3333-4444-555555555555"
OBJECT_INFO = {
    "LoadImage": {"input": {"required": {"image": [["a.png"], {"image_upload": True}]}}, "output": ["IMAGE"]},
    "SaveImage": {"input": {"required": {"images": ["IMAGE"], "filename_prefix": ["STRING", {}]}}, "output_node": True},
}
WORKFLOW = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "a"}},
}
UNFINISHED = ("prompt", "history", "queue")  # a lie there meets a run that goes on until it is interrupted
HEAD = b"HTTP/1.1 200 OK\r\n"


class Lie(NamedTuple):
    """What is sent: first once, then `again` without end, each time after a pause in seconds. With a pause and nothing
    to send again the connection stays open, else it is closed."""

    first: bytes
    again: bytes = b""
    pause: float | None = None


def answer(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


def saying(body: Any) -> Lie:
    return Lie(answer(body if isinstance(body, bytes) else json.dumps(body).encode()))


def frame(data: bytes, opcode: int = 1, last: bool = True) -> bytes:
    size = bytes([len(data)]) if len(data) < 126 else bytes([127]) + len(data).to_bytes(8, "big")
    return bytes([opcode | (128 if last else 0)]) + size + data


def event(kind: Any, data: Any) -> bytes:
    return frame(json.dumps({"type": kind, "data": data}).encode())


def ran(*files: Any, **status: Any) -> Any:
    images = [{"filename": "a_00001_.png", "subfolder": "", "type": "output", **each} for each in files]
    told = {"status_str": "success", "completed": True, "messages": [["execution_success", {}]], **status}
    return {PROMPT_ID: {"outputs": {"2": {"images": images}}, "status": told}}


EVERYWHERE = {
    "stalls": Lie(b"", pause=FOREVER),
    "stalls in the body": Lie(HEAD + b'Content-Length: 100\r\n\r\n{"a', pause=FOREVER),
    "drips a body": Lie(HEAD + b"Content-Length: 1000000\r\n\r\n", b" ", 0.02),
    "drips headers": Lie(HEAD, b"X: x\r\n", 0.02),
    "closes": Lie(b""),
    "closes in the body": Lie(HEAD + b'Content-Length: 100\r\n\r\n{"a": '),
    "no HTTP": Lie(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "a length of exabytes": Lie(HEAD + b"Content-Length: 999999999999999999\r\n\r\n{}"),
    "an endless body": Lie(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"40000\r\n" + b" " * 0x40000 + b"\r\n", 0.001
    ),
    "endless headers": Lie(HEAD, b"X: " + b"x" * 100_000 + b"\r\n", 0.001),
    "redirects elsewhere": Lie(
        answer(b"", b"HTTP/1.1 307 x\r\nLocation: http://user:secret@127.0.0.1:9/\x1b[2Jelsewhere\r\n")
    ),
    "packed": Lie(answer(gzip.compress(b"[" + b" " * 10_000_000 + b"]"), HEAD + b"Content-Encoding: gzip\r\n")),
    "HTTP 500": Lie(answer(b"no\x1b[", b"HTTP/1.1 500 \x1b[2J\r\n")),
}
IN_ANSWERS = {
    "no UTF-8": saying(b'{"\xff\xfe": 1}'),
    "deep": saying(b"[" * 100_000),
    "too long a text": saying(b'{"a": "' + b"x" * 21 * 2**20 + b'"}'),
    "almost too long a text": saying('{"a": "é'.encode() + b"x" * (20 * 2**20 - 100) + b'"}'),
    "too many values": saying(b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"),
    "almost too many values": saying(b'{"a": [' + b"[]," * 390_000 + b"[]]}"),
}
OF_A_SUBMISSION = {
    "an id that is a path": saying({"prompt_id": "../../queue"}),
    "faults of every node": saying(
        {
            "prompt_id": PROMPT_ID,
            "node_errors": {str(n): {"errors": [{"message": "x" * 100}]} for n in range(10_000)},
        }
    ),
}
AFTER_THE_RUN = {  # in the history of a run that is over: nothing is left to interrupt
    "a file outside": saying(ran({"subfolder": "../.."})),
    "a file of a bad name": saying(ran({"filename": "../a.png"})),
    "a file of a long name": saying(ran({"filename": "x" * 100_000})),
    "a million files": saying(ran(*[{}] * 100_000)),
    "an error of unknown kind": saying(ran(status_str="error", messages=[["x", {}], "y", "z\x1b[2J"])),
}
OVER_THE_WEBSOCKET = {
    "no JSON": Lie(frame(b"{"), pause=FOREVER),
    "wrong types": Lie(
        b"".join(event(kind, data) for kind in (5, None, "progress") for data in (5, [], None)), pause=9
    ),
    "a flood of ends": Lie(b"", event("executing", {"node": None, "prompt_id": PROMPT_ID}), 0),
    "a flood of progress": Lie(b"", event("executing", {"node": "1", "prompt_id": PROMPT_ID}) * 100, 0),
    "a flood of previews": Lie(b"", frame(b"x" * 1_000_000, 2), 0),
    "an endless message": Lie(b"", frame(b"x" * 100_000, 0, last=False), 0),
    "a giant frame": Lie(bytes([0x81, 127]) + (2**62).to_bytes(8, "big"), b"x" * 100_000, 0),
    "a flood of empty events": Lie(b"", frame(b"") * 100_000, 0),  # which no buffer counts that counts bytes
    "a flood of empty pings": Lie(b"", frame(b"", 9) * 100_000, 0),
    "no handshake": saying(b"{}"),
}
ENDPOINTS = ("object_info", "upload", "prompt", "history", "queue", "view", "ws")
CASES = [
    *((endpoint, name, lie) for endpoint in ENDPOINTS for name, lie in EVERYWHERE.items()),
    *((endpoint, name, lie) for endpoint in ENDPOINTS[:5] for name, lie in IN_ANSWERS.items()),
    *(("prompt", name, lie) for name, lie in OF_A_SUBMISSION.items()),
    *(("history", name, lie) for name, lie in AFTER_THE_RUN.items()),
    *(("ws", name, lie) for name, lie in OVER_THE_WEBSOCKET.items()),
]


class LyingServer:
    """endpoint: which lies. None as its lie: it reads no body."""

    def __init__(self, endpoint: str = "", lie: Lie | None = None) -> None:
        self.endpoint, self.lie = endpoint, lie
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
        endpoint, _, _ = path.partition("/")
        lies = bool(self.endpoint) and endpoint == self.endpoint
        if lies and self.lie is None:
            await asyncio.sleep(FOREVER)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size + 2)
            await reader.readline()
        if method == "POST":
            self.posted.append(path)
            if endpoint == "prompt":
                self.queued = [[0, PROMPT_ID, {}, {"client_id": json.loads(body)["client_id"]}, []]]
            elif endpoint == "interrupt":
                self.queued = []
        lie = self.lie if lies and (method == "GET" or endpoint in ("prompt", "upload")) else None
        if endpoint == "ws" and (lie is None or lie in OVER_THE_WEBSOCKET.values()) and lie != saying(b"{}"):
            key = (headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
            head = b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            writer.write(head + base64.b64encode(hashlib.sha1(key).digest()) + b"\r\n\r\n")
            lie = lie or Lie(event("status", {"sid": "x"}), pause=FOREVER)
        first, again, pause = lie or Lie(self._truth(path))
        writer.write(first)
        await writer.drain()
        while pause is not None:
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(pause)

    def _truth(self, path: str) -> bytes:
        endpoint, _, name = path.partition("/")
        answers: dict[str, Any] = {
            "object_info": {name: OBJECT_INFO.get(name)},
            "upload": {"name": "a.png", "subfolder": "", "type": "input"},
            "prompt": {"prompt_id": PROMPT_ID, "number": 1, "node_errors": {}},
            "history": ran({}) if self.endpoint not in UNFINISHED else {},
            "queue": {"queue_running": self.queued, "queue_pending": []},
            "interrupt": {},
        }
        if endpoint == "view":
            return answer(PICTURE)
        known = endpoint in answers  # "api" is not: a ComfyUI before 0.26
        return answer(json.dumps(answers.get(endpoint, {})).encode(), HEAD if known else b"HTTP/1.1 404 Not Found\r\n")


@pytest.fixture(autouse=True)
def _given_up_when_it_hangs() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise AssertionError(f"the run still goes on after {HUNG} s")

    before = signal.signal(signal.SIGALRM, give_up), signal.getsignal(signal.SIGTERM)
    signal.alarm(HUNG)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of `onediff-guard run`, but for the server. The history is looked into more often than it is by users."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.1)
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "a.png")
    (tmp_path / "workflow.json").write_text(json.dumps(WORKFLOW))
    folders = ["--out", str(tmp_path / "out"), "--input", str(tmp_path / "in")]
    return ["run", str(tmp_path / "workflow.json"), *folders, "--timeout", str(TIMEOUT)]


def test_a_server_that_does_not_lie(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LyingServer() as server:
        assert cli.main([*arguments[:-1], "60", "--server", server.url]) == 0, capsys.readouterr().err
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [PICTURE]
    assert server.posted == ["upload/image", "prompt"]


@pytest.mark.parametrize("endpoint", ["upload", "prompt"])
def test_a_server_that_reads_nothing(
    endpoint: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than the buffers of both sides hold: an image, and a prompt of as many bytes."""
    Image.effect_noise((3000, 3000), 100).save(tmp_path / "in" / "a.png")
    workflow = {**WORKFLOW, "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x" * 10_000_000}}}
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    with LyingServer(endpoint) as server:
        assert cli.main([*arguments, "--server", server.url]) == ExitCode.RUN_FAILED
    assert "did not take the" in capsys.readouterr().err


def memory(what: str) -> float:
    """In MiB. what: "VmRSS:" now, "VmHWM:" the most."""
    status = Path("/proc/self/status")
    return int(status.read_text().split(what)[1].split()[0]) / 1024 if status.exists() else 0.0


@pytest.mark.parametrize(("endpoint", "name", "lie"), CASES, ids=[f"{endpoint}: {name}" for endpoint, name, _ in CASES])
def test_a_lie(
    endpoint: str,
    name: str,
    lie: Lie,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if endpoint != "queue":  # which is asked before a run is interrupted: here it answers, however busy the machine is
        monkeypatch.setattr(follow, "CANCEL_SECONDS", HUNG)
    if "endless" in name or "flood" in name:
        arguments[-1] = "2"  # time to fill memory
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")  # it starts anew
    start = memory("VmRSS:")
    with LyingServer(endpoint, lie) as server:
        code = cli.main([*arguments, "--server", server.url])
        interrupted = "interrupt" in server.posted
    assert memory("VmHWM:") - start <= MEMORY
    _, said = capsys.readouterr()
    errors = [line for line in said.splitlines() if line.startswith("onediff-guard: ")]
    assert "Unexpected" not in said and "Traceback" not in said
    assert "secret" not in said and len(said) < 20_000
    assert len(errors) == (code != ExitCode.DONE)
    assert code in ExitCode.__members__.values()
    written = [path.read_bytes() for path in (tmp_path / "out").glob("**/*") if path.is_file()]
    assert set(written) <= {PICTURE} and (code == ExitCode.DONE or not written)
    submitted = "prompt" in server.posted and endpoint in ("prompt", "history") and name not in AFTER_THE_RUN
    assert interrupted or not submitted or code == ExitCode.DONE, said
