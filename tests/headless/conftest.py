"""Stand-ins for the headless tests: small classic nodes, and a ComfyUI server that does what a test tells it."""

# ruff: noqa: N802 - ComfyUI's names

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from at_once import HANG_SECONDS
from comfyui_onediff_guard.headless.batch import ray_pool
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.hosts import core_nodes, local
from comfyui_onediff_guard.headless.hosts.local import run_local
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.server import api, follow
from comfyui_onediff_guard.headless.server.follow import run_on_server
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - a fixture for all tests here
from waiting import wait_until


class Noise:
    RETURN_TYPES = ("IMAGE", "STRING")
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "width": ("INT", {"default": 32, "min": 8, "max": 64}),
                "seed": ("INT", {"default": 0, "control_after_generate": True}),
                "kind": (["uniform", "nan"],),
                "text": ("STRING", {"multiline": True}),
            },
            "optional": {"gain": ("FLOAT", {"default": 1.0, "min": 0.0}), "mask": ("MASK",)},
            "hidden": {"node_id": "UNIQUE_ID"},
        }

    def make(self, width: int, seed: int, kind: str, text: str, gain: float = 1.0, node_id: str = "") -> dict[str, Any]:
        images = torch.rand(3, 16, width, 3, generator=torch.Generator().manual_seed(seed)) * gain
        if kind == "nan":
            images = images * float("nan")
        summary = f"{node_id}: {width} px, {text}"
        return {"ui": {"text": [summary], "onediff_guard": [{"peak": float("inf")}]}, "result": (images, summary)}


class Picky:
    """Checks its own inputs: even numbers only."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "go"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",), "number": ("INT", {"min": 0, "max": 10})}}

    @classmethod
    def VALIDATE_INPUTS(cls, number: int, images: object = "not linked") -> bool | str:
        assert images is None, "linked inputs arrive as None"
        return True if number % 2 == 0 else f"number {number} is odd, use {number + 1}"

    def go(self, images: torch.Tensor, number: int) -> tuple[torch.Tensor]:
        return (images * number,)


class Broken:
    RETURN_TYPES = ()
    FUNCTION = "go"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",)}}

    def go(self, images: torch.Tensor) -> tuple[()]:
        raise RuntimeError("the GPU is on fire")


STAND_INS: dict[str, type] = {"Noise": Noise, "Picky": Picky, "Broken": Broken, **core_nodes.NODE_CLASS_MAPPINGS}


def noise(**inputs: Any) -> dict[str, Any]:
    return {"class_type": "Noise", "inputs": {"width": 32, "seed": 1, "kind": "uniform", "text": "cat", **inputs}}


@pytest.fixture
def workflow() -> dict[str, Any]:
    """Noise into SaveImage, in API format."""
    return {
        "1": noise() | {"_meta": {"title": "Some Noise"}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "pictures/noise"}},
    }


@pytest.fixture
def classes() -> dict[str, type]:
    return dict(STAND_INS)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunResult]:
    """`run_local` with the stand-ins and with folders below tmp_path."""

    def run_it(workflow: dict[str, Any], **options: Any) -> RunResult:
        folders = {"models": [], "input_dir": tmp_path / "input", "output_dir": tmp_path / "out"}
        return run_local(workflow, classes=STAND_INS, **folders, **options)

    return run_it


async def _answered(request: web.Request, handler: Any) -> web.StreamResponse:
    return await handler(request)


class FakeComfy:
    """ComfyUI's HTTP and websocket API, with `script` in place of an executor."""

    prompt_id = "the-prompt"

    def __init__(self) -> None:
        self.script: Callable[[FakeComfy], Any] = FakeComfy.succeed
        self.object_info: dict[str, Any] = {
            "Noise": {"input": json.loads(json.dumps(Noise.INPUT_TYPES())), "output": ["IMAGE"], "output_node": False},
            "SaveImage": {"input": {"required": {"images": ["IMAGE"], "filename_prefix": ["STRING", {}]}}},
            "LoadImage": {"input": {"required": {"image": [["a.png"], {"image_upload": True}]}}, "output": ["IMAGE"]},
        }
        self.history: dict[str, Any] = {}
        self.running: list[Any] = []
        self.pending: list[Any] = []
        self.requests: list[tuple[str, Any]] = []  # what was POSTed: path, body
        self.files: dict[str, bytes] = {"a_00001_.png": b"picture"}
        self.node_errors: dict[str, Any] = {}
        self.refuse = False
        self.cancels = False  # by id, as since 0.26
        self.uploaded: Any = ()  # an answer to an upload in place of the right one
        self.first: Callable[[web.Request], web.StreamResponse | None] = lambda _: None  # answers before all others
        self.around: Callable[[web.Request, Any], Awaitable[web.StreamResponse]] = _answered
        self.sockets: list[web.WebSocketResponse] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = ""

    async def send(self, kind: str, **data: Any) -> None:
        for socket in list(self.sockets):
            await socket.send_json({"type": kind, "data": {"prompt_id": self.prompt_id, **data}})

    def finish(self, outputs: dict[str, Any], status: str = "success", messages: list[Any] | None = None) -> None:
        self.running.clear()
        self.history[self.prompt_id] = {
            "outputs": outputs,
            "status": {"status_str": status, "completed": status == "success", "messages": messages or []},
        }

    async def succeed(self) -> None:
        """As 0.3.64 does it."""
        await self.send("executing", node="1")
        await self.send("progress", node="1", value=1, max=2)
        await self.send("execution_success")
        self.finish({"2": {"images": [{"filename": "a_00001_.png", "subfolder": "sub", "type": "output"}]}})
        await self.send("executing", node=None)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(HANG_SECONDS)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start_site())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start_site(self) -> None:
        @web.middleware
        async def first(request: web.Request, handler: Any) -> web.StreamResponse:
            return self.first(request) or await self.around(request, handler)

        app = web.Application(middlewares=[first])
        app.add_routes(
            [
                web.get("/ws", self._websocket),
                web.get("/object_info/{name}", self._object_info),
                web.get("/queue", self._queue),
                web.get("/history/{prompt_id}", self._history),
                web.get("/view", self._view),
                web.post("/prompt", self._prompt),
                web.post("/upload/image", self._upload),
                web.post("/{command:interrupt|queue}", self._command),
                web.post("/api/jobs/{id}/cancel", self._cancel),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(b"\0\0\0\1 a preview")
        self.sockets.append(socket)
        async for _ in socket:
            ...
        self.sockets.remove(socket)
        return socket

    async def _object_info(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response({name: self.object_info[name]} if name in self.object_info else {})

    async def _queue(self, request: web.Request) -> web.Response:
        return web.json_response({"queue_running": self.running, "queue_pending": self.pending})

    async def _history(self, request: web.Request) -> web.Response:
        prompt_id = request.match_info["prompt_id"]
        found = self.history.get(prompt_id)
        return web.json_response({prompt_id: found} if found else {})

    async def _view(self, request: web.Request) -> web.Response:
        data = self.files.get(request.query["filename"])
        return web.Response(body=data) if data is not None else web.Response(status=404)

    async def _prompt(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(("prompt", body))
        if self.refuse:
            error = {"message": "Prompt outputs failed validation", "details": ""}
            return web.json_response({"error": error, "node_errors": self.node_errors}, status=400)
        self.running.append([0, self.prompt_id, body["prompt"], {"client_id": body["client_id"]}, []])
        self._task = asyncio.ensure_future(self.script(self))
        return web.json_response({"prompt_id": self.prompt_id, "number": 1, "node_errors": self.node_errors})

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        image = form["image"]
        assert isinstance(image, web.FileField)
        self.requests.append(("upload", image.file.read()))
        return web.json_response(
            self.uploaded
            if self.uploaded != ()
            else {"name": f"uploaded {image.filename}", "subfolder": "", "type": "input"}
        )

    async def _cancel(self, request: web.Request) -> web.Response:
        if not self.cancels:
            return web.Response(status=404)
        self.requests.append(("cancel", request.match_info["id"]))
        return web.json_response({"cancelled": True})

    async def _command(self, request: web.Request) -> web.Response:
        self.requests.append((request.match_info["command"], await request.json()))
        return web.Response()


@pytest.fixture
def comfy() -> Iterator[FakeComfy]:
    server = FakeComfy()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """console(*arguments of onediff-guard) → (exit status, what it printed, and to stderr)."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()  # what building a model printed
        code = cli.main([*map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def here(tmp_path: Path, workflow: dict[str, Any], classes: dict[str, type], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with workflow.json, where the stand-in nodes are what this process knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "default_classes", lambda: classes)
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    return tmp_path


@pytest.fixture
def there(
    comfy: Any, workflow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunResult]:
    """Run the workflow on the stand-in server, with short pauses."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(follow, "RECONNECT_SECONDS", 0.05)
    monkeypatch.setattr(api, "PAUSE_SECONDS", 0.01)

    def run(**options: Any) -> RunResult:
        return run_on_server(
            options.pop("workflow", workflow), url=options.pop("url", comfy.url), output_dir=tmp_path / "out", **options
        )

    return run


@pytest.fixture
def jobs_file(tmp_path: Path) -> Callable[..., Any]:
    """jobs_file(lines) → the file of them as a batch reads it, of toys."""
    import toy_jobs
    from comfyui_onediff_guard.headless.batch.jobs import JobsFile

    def make(*lines: dict[str, Any] | str, **options: Any) -> JobsFile:
        file = tmp_path / "jobs.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return JobsFile(file, **{"workflows": tmp_path, "input_dir": None, "read": toy_jobs.read, **options})

    return make


RAY = """\
import sys
from comfyui_onediff_guard.headless.batch.ray_pool import connected
with connected(None, workers=4) as ray:
    print(ray.get_runtime_context().gcs_address, file=sys.__stdout__, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a Ray for toys, shared by all tests but those of how one is started and ended."""
    _skip_without_ray()
    from batch_runs import surroundings

    with surroundings() as environment:
        for variable in ("ONEDIFF_GUARD_COMPILED", "ONEDIFF_GUARD_PROFILES"):
            environment[variable] = str(tmp_path_factory.mktemp("kept"))
        command, pipe = [sys.executable, "-c", RAY], subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as ray:
            assert ray.stdout
            address = ray.stdout.readline().strip()
            assert address, "no Ray starts here"
            yield address


@pytest.fixture
def toy_batch(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """toy_batch(lines, *options) → a command on toy jobs, under a Ray of its own; it is gone at the end."""
    _skip_without_ray()
    import toy_jobs
    from batch_runs import Batch, surroundings

    numbers, made = itertools.count(), list[Batch]()
    (tmp_path / "models").mkdir()
    with surroundings() as environment:

        def make(lines: list[dict[str, Any]], *options: str, log: Path | None = None) -> Batch:
            jobs = toy_jobs.write_jobs(tmp_path / f"jobs{next(numbers)}.jsonl", lines)
            made.append(Batch(jobs, tmp_path / "out", options, environment, log=log))
            return made[-1]

        yield make
        for each in made:
            if each.process and each.process.poll() is None:
                each.process.terminate()
                each.process.communicate()


@pytest.fixture
def joined_batch(toy_batch: Callable[..., Any], ray_address: str) -> Iterator[Callable[..., Any]]:
    """The same under the shared Ray, on which it leaves no worker."""
    made = []

    def make(lines: list[dict[str, Any]], *options: str, **more: Any) -> Any:
        made.append(toy_batch(lines, "--ray", ray_address, *options, **more))
        made[-1].environment |= ray_pool.LOOPBACK  # else Ray takes 127.0.0.1 for the machine's other address
        return made[-1]

    yield make
    workers = {start["pid"] for each in made for start in each.starts()}
    wait_until(lambda: not any(map(psutil.pid_exists, workers)), "the batch's workers are gone")


def _skip_without_ray() -> None:
    if not find_spec("ray"):  # importing it would change this process
        pytest.skip("Ray is not installed: pip install '.[scale]'")
