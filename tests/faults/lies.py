"""What a server may do instead of answering: by HTTP, by what stands in an answer, over the websocket."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from typing import Any

from lying_server import ENTRY, PROMPT_ID, Connection, Lie

FOREVER = 10_000
HEAD = b"HTTP/1.1 200 OK\r\n"


def raw(*parts: bytes) -> Lie:
    async def lie(connection: Connection) -> None:
        for part in parts:
            await connection.send(part)

    return lie


async def stall(connection: Connection) -> None:
    await asyncio.sleep(FOREVER)


async def stall_in_the_headers(connection: Connection) -> None:
    await connection.send(HEAD + b"Content-Type: application/json\r\n")
    await asyncio.sleep(FOREVER)


async def stall_in_the_body(connection: Connection) -> None:
    await connection.send(HEAD + b'Content-Length: 100\r\n\r\n{"a')
    await asyncio.sleep(FOREVER)


async def drip_headers(connection: Connection) -> None:
    await connection.send(HEAD)
    for number in range(FOREVER):
        await connection.send(b"X-%d: x\r\n" % number)
        await asyncio.sleep(0.02)


async def drip_body(connection: Connection) -> None:
    await connection.send(HEAD + b"Content-Length: 1000000\r\n\r\n")
    while True:
        await connection.send(b" ")
        await asyncio.sleep(0.02)


async def drip_chunks(connection: Connection) -> None:
    await connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        await connection.send(b"1\r\n \r\n")
        await asyncio.sleep(0.02)


async def reset(connection: Connection) -> None:
    connection.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.writer.transport.abort()


def endless(head: bytes, part: bytes) -> Lie:
    async def lie(connection: Connection) -> None:
        await connection.send(head)
        while True:
            await connection.send(part)
            await asyncio.sleep(0.001)

    return lie


async def redirect(connection: Connection) -> None:
    await connection.answer(b"", "302 Found", Location=f"http://{connection.headers['host']}/{connection.path}")


async def redirect_elsewhere(connection: Connection) -> None:
    await connection.answer(b"", "307 Temporary Redirect", Location="http://user:secret@127.0.0.1:9/\x1b[2Jelsewhere")


async def packed(connection: Connection) -> None:
    await connection.answer(gzip.compress(b"[" + b" " * 10_000_000 + b"]"), Content_Encoding="gzip")


CHUNK = b"40000\r\n" + b" " * 0x40000 + b"\r\n"
OVER_HTTP: dict[str, Lie] = {
    "stalls": stall,
    "stalls in the headers": stall_in_the_headers,
    "stalls in the body": stall_in_the_body,
    "drips headers": drip_headers,
    "drips a body": drip_body,
    "drips chunks": drip_chunks,
    "closes": raw(b""),
    "closes in the headers": raw(HEAD + b"Content-Le"),
    "closes in the body": raw(HEAD + b'Content-Length: 100\r\n\r\n{"a": '),
    "closes in a chunk": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"ff\r\n{"),
    "resets": reset,
    "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "no status": raw(b"HTTP/1.1 abc def\r\n\r\n"),
    "negative length": raw(HEAD + b"Content-Length: -5\r\n\r\n{}"),
    "two lengths": raw(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "a length of 5,000 digits": raw(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"),
    "a bad chunk": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "binary headers": raw(HEAD + b"X: \x00\xff\x1b[2J\r\nContent-Length: 2\r\n\r\n{}"),
    "a length of exabytes": raw(HEAD + b"Content-Length: 999999999999999999\r\n\r\n{}"),
    "an endless body": endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK),
    "endless headers": endless(HEAD, b"".join(b"X-%d: %s\r\n" % (n, b"x" * 100) for n in range(2000))),
    "an endless header": endless(HEAD + b"X: ", b"x" * 100_000),
    "endless continues": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "redirects to itself": redirect,
    "redirects elsewhere": redirect_elsewhere,
    "packed": packed,
    "HTTP 204": raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "HTTP 404": raw(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"),
    "HTTP 500": raw(b"HTTP/1.1 500 \x1b[2J\r\nContent-Length: 4\r\n\r\nno\x1b["),
}


def saying(body: bytes) -> Lie:
    async def lie(connection: Connection) -> None:
        await connection.answer(body)

    return lie


IN_ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "text": b"hello",
    "a list": b"[]",
    "no UTF-8": b'{"\xff\xfe": 1}',
    "deep": b"[" * 100_000,
    "deep enough": b'{"a":' * 150 + b"1" + b"}" * 150,
    "a number of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "too long a text": b'{"a": "' + b"x" * 21 * 2**20 + b'"}',
    "almost too long a text": '{"a": "é'.encode() + "\U0001f600".encode() + b"x" * (20 * 2**20 - 100) + b'"}',
    "almost too many values": b'{"a": [' + b"[]," * 390_000 + b"[]]}",
    "too many values": b'{"a": [' + b"[]," * 1_000_000 + b"[]]}",
}
LONG = "x" * 100_000
FILE = {"filename": "a_00001_.png", "subfolder": "", "type": "output"}


def _ran(outputs: Any, **status: Any) -> Any:
    return {PROMPT_ID: {"outputs": outputs, "status": {**ENTRY["status"], **status}}}


def _files(*entries: Any) -> Any:
    return _ran({"2": {"images": list(entries)}})


WRONG: dict[str, Any] = {  # of a submission; of others, what may be wrong is drawn in test_fuzz_server.py
    "an id that is a path": {"prompt_id": "../../queue"},
    "faults of every node": {
        "prompt_id": PROMPT_ID,
        "node_errors": {str(n): {"errors": [{"message": LONG[:100]}]} for n in range(10_000)},
    },
}
AFTER_THE_RUN: dict[str, Any] = {  # in the history of a run that is over: nothing is left to interrupt
    "a file outside": _files({**FILE, "subfolder": "../.."}),
    "a file at the root": _files({**FILE, "subfolder": "/etc"}),
    "a file of a bad name": _files({**FILE, "filename": "../a.png"}),
    "a file of a long name": _files({**FILE, "filename": LONG}),
    "a file named NUL": _files({**FILE, "filename": "a\0.png"}),
    "a million files": _files(*[{"filename": "a"}] * 200_000),
    "more files than are taken": _files(*[{"filename": "a"}] * 30_000),
    "an error without a node": _ran({}, status_str="error", messages=[["execution_error", {}]]),
    "a long error": _ran({}, status_str="error", messages=[["execution_error", {"exception_message": LONG}]]),
    "an error of unknown kind": _ran({}, status_str="error", messages=[["x", {}], "y", "z\x1b[2J"]),
    "interrupted by nobody": _ran({}, status_str="error", messages=[["execution_interrupted", {"node_id": None}]]),
}


def told(*frames: tuple[bytes, int, bool], again: bool = False) -> Lie:
    async def lie(connection: Connection) -> None:
        await connection.upgrade()
        while True:
            for data, opcode, last in frames:
                await connection.frame(data, opcode, last)
            if not again:
                break
            await asyncio.sleep(0)
        await connection.reader.read()

    return lie


def _event(kind: Any, data: Any) -> tuple[bytes, int, bool]:
    return json.dumps({"type": kind, "data": data}).encode(), 1, True


async def a_giant_frame(connection: Connection) -> None:
    await connection.upgrade()
    await connection.send(bytes([0x81, 127]) + (2**62).to_bytes(8, "big"))
    while True:
        await connection.send(b"x" * 100_000)


def flood(opcode: int) -> Lie:
    """Of frames with nothing in them, which take no room in any buffer that counts bytes."""

    async def lie(connection: Connection) -> None:
        await connection.upgrade()
        while True:
            await connection.send(bytes([0x80 | opcode, 0]) * 100_000)
            await asyncio.sleep(0)

    return lie


OVER_THE_WEBSOCKET: dict[str, Lie] = {
    "no JSON": told((b"{", 1, True)),
    "no UTF-8": told((b"\xff\xff", 1, True)),
    "wrong types": told(*(_event(kind, data) for kind in (5, None, "progress", "executing") for data in (5, [], None))),
    "numbers that are text": told(_event("progress", {"value": "1", "max": [], "node": {}})),
    "numbers without end": told((b'{"type": "progress", "data": {"value": NaN, "max": 1e999, "node": "1"}}', 1, True)),
    "others' events": told(_event("execution_error", {"prompt_id": "other"}), again=True),
    "a flood of ends": told(_event("executing", {"node": None, "prompt_id": PROMPT_ID}), again=True),
    "a flood of progress": told(
        *(_event("executing", {"node": str(n), "prompt_id": PROMPT_ID}) for n in range(100)), again=True
    ),
    "a flood of previews": told((b"x" * 1_000_000, 2, True), again=True),
    "an endless message": told((b"x" * 100_000, 0, False), again=True),
    "a giant frame": a_giant_frame,
    "pings": told((b"x" * 100, 9, True), again=True),
    "a flood of empty events": flood(1),
    "a flood of empty previews": flood(2),
    "a flood of empty pings": flood(9),
    "a flood of empty pongs": flood(10),
    "a bad frame": told((b"x", 15, True)),
    "no handshake": saying(b"{}"),
}

Case = tuple[str, str, Lie]


def cases() -> list[Case]:
    """(endpoint, what it does, the lie)."""
    found: list[Case] = []
    for endpoint in ("object_info", "upload", "prompt", "history", "queue", "view", "ws"):
        found += [(endpoint, name, lie) for name, lie in OVER_HTTP.items()]
    for endpoint in ("object_info", "upload", "prompt", "history", "queue"):
        found += [(endpoint, name, saying(body)) for name, body in IN_ANSWERS.items()]
    found += [("prompt", name, saying(json.dumps(body).encode())) for name, body in WRONG.items()]
    found += [("history", name, saying(json.dumps(body).encode())) for name, body in AFTER_THE_RUN.items()]
    found += [("ws", name, lie) for name, lie in OVER_THE_WEBSOCKET.items()]
    return found
