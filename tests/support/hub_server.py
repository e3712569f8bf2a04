"""A local hub server: the parts of the API that huggingface_hub uses for downloads, and faults on demand.

Like the real hub it serves small files directly, redirects large ones (LFS) to another host, the CDN, which supports
ranges, and offers them by Xet. `requests` lists the requests with the number of bytes sent.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hub_files import files_of

LFS = (".safetensors", ".model", ".bin", ".ckpt", ".msgpack")
BLOCK = 32 * 1024  # bytes sent at a time
HANG_SECONDS = 60.0  # timeout for tests that would hang


@dataclass
class Request:
    method: str
    path: str  # of the file in its repository, or of the API
    sent: int = 0  # bytes of the body
    cdn: bool = False
    authorization: str | None = None


@dataclass
class Commit:
    files: Mapping[str, bytes]

    @property
    def sha(self) -> str:
        names = b"".join(path.encode() + blob_id(path, data).encode() for path, data in sorted(self.files.items()))
        return hashlib.sha1(names).hexdigest()


@dataclass
class Faults:
    seconds_per_block: float = 0.0
    hang: set[str] = field(default_factory=set)  # files whose download stops after the first block
    cut: dict[str, int] = field(default_factory=dict)  # file → number of further answers that end in the middle
    corrupt: set[str] = field(default_factory=set)  # files whose bytes differ from their hash
    status: dict[str, tuple[int, str]] = field(default_factory=dict)  # file or "api" → status, X-Error-Code
    size: dict[str, int] = field(default_factory=dict)  # file → wrong size that the API reports


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}"  # another host
        self.revisions: dict[tuple[str, str], Commit] = {}  # (hub id, branch, tag or commit)
        self.token: str | None = None  # the accepted token; None: no token is needed
        self.faults = Faults()
        self.requests: list[Request] = []
        self.released = threading.Event()  # ends hanging answers
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=partial(self.serve_forever, poll_interval=0.02), daemon=True)
        self._thread.start()

    def push(self, hub_id: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Returns the commit."""
        commit = Commit(files)
        self.revisions[hub_id, revision] = self.revisions[hub_id, commit.sha] = commit
        return commit.sha

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        for connection in self._connections:  # clients keep them open
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def gets(self, path: str = "") -> list[Request]:
        """Requests whose body was sent, for files whose path ends with `path`."""
        return [request for request in self.requests if request.sent and request.path.endswith(path)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Generator[HubServer]:
    """A hub that huggingface_hub uses in this process, with an empty cache in `folder`."""
    from huggingface_hub import constants, file_download, utils

    close_sessions: Any = getattr(utils, "close_session", None) or utils.reset_sessions  # closes kept connections
    server = HubServer()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "token"),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": BLOCK,
    }.items():
        monkeypatch.setattr(constants, name, value)
        if hasattr(file_download, name):  # older versions import some constants by name
            monkeypatch.setattr(file_download, name, value)
    try:
        yield server
    finally:
        server.close()
        close_sessions()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[HubServer]:
    """A hub that huggingface_hub in this process talks to, and an empty cache."""
    with running_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def files(model_folder: Callable[..., Path]) -> dict[str, bytes]:
    """Files of a small CogVideoX."""
    return files_of(model_folder())


def blob_id(path: str, data: bytes) -> str:
    if path.endswith(LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path).path
        self.request_log = Request(self.command, url, authorization=self.headers.get("Authorization"))
        for pattern, answer in (
            (r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", self._api),
            (r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", self._file),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ):
            if match := re.fullmatch(pattern, url):
                self.server.requests.append(self.request_log)
                answer(*map(unquote, match.groups()))
                return
        self._fail(404, "RepoNotFound")  # the library also checks for updates of itself

    def _commit(self, hub_id: str, revision: str) -> Commit | None:
        """None: an error was sent."""
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._fail(401, "RepoNotFound")
        elif hub_id not in {known for known, _ in self.server.revisions}:
            self._fail(404, "RepoNotFound")
        elif (hub_id, revision) not in self.server.revisions:
            self._fail(404, "RevisionNotFound")
        else:
            return self.server.revisions[hub_id, revision]
        return None

    def _api(self, hub_id: str, what: str, revision: str) -> None:
        self.request_log.path = "api"
        if self._faulty("api") or not (commit := self._commit(hub_id, revision)):
            return
        siblings, tree = [], []
        for path, data in commit.files.items():
            blob, size = blob_id(path, data), self.server.faults.size.get(path, len(data))
            lfs = {"size": size, "pointerSize": 130}
            siblings.append({"rfilename": path, "size": size, "blobId": blob, "lfs": {"sha256": blob, **lfs}})
            tree.append({"type": "file", "path": path, "size": size, "oid": blob, "lfs": {"oid": blob, **lfs}})
            if path.endswith(LFS):
                tree[-1]["xetHash"] = blob
            else:
                del siblings[-1]["lfs"], tree[-1]["lfs"]
        info = {"id": hub_id, "modelId": hub_id, "sha": commit.sha, "private": False, "tags": [], "siblings": siblings}
        self._send(json.dumps(info if what == "revision" else tree).encode(), {"Content-Type": "application/json"})

    def _resolve(self, hub_id: str, revision: str, path: str) -> None:
        self.request_log.path = path
        if self._faulty(path) or not (commit := self._commit(hub_id, revision)):
            return
        if path not in commit.files:
            self._fail(404, "EntryNotFound")
            return
        data = commit.files[path]
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob_id(path, data)}"'}
        if path.endswith(LFS):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
            headers |= {"X-Xet-Hash": blob_id(path, data), "X-Xet-Refresh-Route": f"{self.server.endpoint}/xet"}
            headers |= {"Location": f"{self.server.cdn}/cdn/{hub_id}/{commit.sha}/{path}"}
            self._send(b"", headers, 302)
        else:
            self._send(data, headers, path=path)

    def _file(self, hub_id: str, revision: str, path: str) -> None:
        self.request_log.path, self.request_log.cdn = path, True
        data = self.server.revisions[hub_id, revision].files[path]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            first = int(wanted[1])
            headers = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
            self._send(data[first:], headers, 206, path)
        else:
            self._send(data, {}, path=path)

    def _faulty(self, path: str) -> bool:
        status, code = self.server.faults.status.get(path, (0, ""))
        if status:
            self._fail(status, code)
        return bool(status)

    def _fail(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def _send(self, data: bytes, headers: Mapping[str, str], status: int = 200, path: str = "") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        faults, body = self.server.faults, memoryview(data)
        if path in faults.corrupt:
            body = memoryview(bytes(byte ^ 1 for byte in data[:BLOCK]) + data[BLOCK:])
        if faults.cut.get(path, 0) > 0:
            faults.cut[path] -= 1
            body = body[: len(body) // 2]
        for start in range(0, len(body), BLOCK):
            self.wfile.write(body[start : start + BLOCK])
            self.request_log.sent += len(body[start : start + BLOCK])
            time.sleep(faults.seconds_per_block)
            if path in faults.hang:
                self.server.released.wait(HANG_SECONDS)
                break
        if self.request_log.sent < len(data):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """`requests` is the log."""
