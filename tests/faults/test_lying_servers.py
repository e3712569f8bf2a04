"""A malicious server: the run ends in time with at most one error line and leaves no partial file.

The server is a fake ComfyUI with one wrong answer.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.errors import ExitCode
from comfyui_onediff_guard.headless.server import follow
from fake_comfy import FakeComfy, picture
from PIL import Image

TIMEOUT = 0.6  # seconds
HUNG = 60  # seconds after which a test fails
MEMORY = 300  # MiB that a run may use, including the server
FOREVER = 10_000
PICTURE = b"\x89PNG whole"
PROMPT_ID = FakeComfy.prompt_id
UNFINISHED = ("prompt", "history", "queue")  # with these endpoints the run continues until it is interrupted
HEAD = b"HTTP/1.1 200 OK\r\n"


class Lie(NamedTuple):
    """The data sent: `first` once, then `again` without end, with a pause in seconds between. Without a pause the
    connection is closed."""

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
AFTER_THE_RUN = {  # in the history of a finished run: nothing to interrupt
    "a file outside": saying(ran({"subfolder": "../.."})),
    "a file of a bad name": saying(ran({"filename": "../a.png"})),
    "a file of a long name": saying(ran({"filename": "x" * 100_000})),
    "a million files": saying(ran(*[{}] * 100_000)),
    "an error of unknown kind": saying(ran(status_str="error", messages=[["x", {}], "y", "z\x1b[2J"])),
}
NO_HANDSHAKE = saying(b"{}")
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
    "a flood of empty events": Lie(b"", frame(b"") * 100_000, 0),  # not limited by buffers that count bytes
    "a flood of empty pings": Lie(b"", frame(b"", 9) * 100_000, 0),
    "no handshake": NO_HANDSHAKE,
}
ENDPOINTS = ("object_info", "upload", "prompt", "history", "queue", "view", "ws")
CASES = [
    *((endpoint, name, lie) for endpoint in ENDPOINTS for name, lie in EVERYWHERE.items()),
    *((endpoint, name, lie) for endpoint in ENDPOINTS[:5] for name, lie in IN_ANSWERS.items()),
    *(("prompt", name, lie) for name, lie in OF_A_SUBMISSION.items()),
    *(("history", name, lie) for name, lie in AFTER_THE_RUN.items()),
    *(("ws", name, lie) for name, lie in OVER_THE_WEBSOCKET.items()),
]


class LyingServer(FakeComfy):
    """endpoint: the one with the wrong answer. lie: None never reads the request's body."""

    def __init__(self, endpoint: str = "", lie: Lie | None = None) -> None:
        super().__init__()
        self.endpoint, self.lie, self.around = endpoint, lie, self._lying
        self.files = {"a_00001_.png": PICTURE}
        self.script = FakeComfy.succeed if endpoint not in UNFINISHED else lambda _: asyncio.sleep(0)

    @property
    def posted(self) -> list[str]:
        return [path for path, _ in self.requests]

    async def _lying(self, request: web.Request, handler: Any) -> web.StreamResponse:
        endpoint = request.path.split("/")[1]
        if endpoint != self.endpoint:
            return await handler(request)
        if self.lie is None:
            await asyncio.sleep(FOREVER)
        if self.lie in OVER_THE_WEBSOCKET.values() and self.lie != NO_HANDSHAKE:
            await web.WebSocketResponse().prepare(request)
        elif endpoint != "ws":
            await handler(request)  # its answer is discarded
        assert self.lie and request.transport
        request.transport.write(self.lie.first)
        while self.lie.pause is not None and not request.transport.is_closing():
            request.transport.write(self.lie.again)
            await request.writer.drain()
            await asyncio.sleep(self.lie.pause)
        request.transport.close()
        return web.Response()


@pytest.fixture(autouse=True)
def _fail_on_hang() -> Iterator[None]:
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
    """Arguments of `onediff-guard run` without the server. The history is polled more often than by default."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.1)
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "a.png")
    (tmp_path / "workflow.json").write_text(json.dumps(picture()))
    folders = ["--out", str(tmp_path / "out"), "--input", str(tmp_path / "in")]
    return ["run", str(tmp_path / "workflow.json"), *folders, "--timeout", str(TIMEOUT)]


def test_honest_server_run_succeeds(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LyingServer() as server:
        assert cli.main([*arguments[:-1], "60", "--server", server.url]) == 0, capsys.readouterr().err
    assert [path.read_bytes() for path in (tmp_path / "out" / "sub").iterdir()] == [PICTURE]
    assert server.posted == ["upload", "prompt"]


@pytest.mark.parametrize("endpoint", ["upload", "prompt"])
def test_server_that_reads_nothing_fails_the_run(
    endpoint: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image and a prompt larger than the buffers of both sides."""
    Image.effect_noise((3000, 3000), 100).save(tmp_path / "in" / "a.png")
    workflow = {**picture(), "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x" * 10_000_000}}}
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    with LyingServer(endpoint) as server:
        assert cli.main([*arguments, "--server", server.url]) == ExitCode.RUN_FAILED
    assert "did not accept the" in capsys.readouterr().err


def memory(field: str) -> float:
    """In MiB. field: "VmRSS:" now, "VmHWM:" peak."""
    status = Path("/proc/self/status")
    return int(status.read_text().split(field)[1].split()[0]) / 1024 if status.exists() else 0.0


@pytest.mark.parametrize(("endpoint", "name", "lie"), CASES, ids=[f"{endpoint}: {name}" for endpoint, name, _ in CASES])
def test_malicious_answer_ends_the_run_with_at_most_one_error(
    endpoint: str,
    name: str,
    lie: Lie,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if endpoint != "queue":  # read before an interrupt: it must answer, however busy the machine is
        monkeypatch.setattr(follow, "CANCEL_SECONDS", HUNG)
    if "endless" in name or "flood" in name:
        arguments[-1] = "2"  # time to fill memory
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")  # resets the peak
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
