"""A fake ComfyUI server controlled by the test, its node, a minimal workflow of ComfyUI's own nodes, and stand-ins for
its classes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from aiohttp import web
from waiting import HANG_SECONDS


def picture(image: Any = "a.png", **more: Any) -> dict[str, Any]:
    """A workflow that saves an image of the input folder. more: further inputs of its loader."""
    return {
        "1": {"class_type": "LoadImage", "inputs": {"image": image, **more}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }


class InterruptProcessingException(Exception):
    """As ComfyUI's was until 2026: the pack knows it by its name."""


class BareVae:
    """As ComfyUI's VAE, without tensors."""

    def __init__(self) -> None:
        self.first_stage_model = self._Network()

    def decode(self, latents: Any) -> Any: ...

    decode_tiled = encode = encode_tiled = decode

    class _Network:
        def decode(self, latents: Any) -> Any: ...

        encode = decode


class Noise:
    RETURN_TYPES = ("IMAGE", "STRING")
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's name
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


async def _answered(request: web.Request, handler: Any) -> web.StreamResponse:
    return await handler(request)


class FakeComfy:
    """ComfyUI's HTTP and websocket API, with `script` instead of an executor."""

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
        self.requests: list[tuple[str, Any]] = []  # POST requests: path, body
        self.files: dict[str, bytes] = {"a_00001_.png": b"picture"}
        self.node_errors: dict[str, Any] = {}
        self.refuse = False
        self.cancels = False  # whether it cancels by id, as ComfyUI does since 0.26
        self.uploaded: Any = ()  # replaces the answer to an upload
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
        """Finish the prompt like 0.3.64."""
        await self.send("executing", node="1")
        await self.send("progress", node="1", value=1, max=2)
        await self.send("execution_success")
        self.finish({"2": {"images": [{"filename": "a_00001_.png", "subfolder": "sub", "type": "output"}]}})
        await self.send("executing", node=None)

    def __enter__(self) -> FakeComfy:
        self._thread.start()
        assert self._ready.wait(HANG_SECONDS)
        return self

    def __exit__(self, *_error: object) -> None:
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

        app = web.Application(middlewares=[first], client_max_size=2**30)
        app.add_routes(
            [
                web.get("/ws", self._websocket),
                web.get("/object_info/{name}", self._object_info),
                web.get("/queue", self._queue),
                web.get("/prompt", self._waiting),
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

    async def _waiting(self, request: web.Request) -> web.Response:
        return web.json_response({"exec_info": {"queue_remaining": len(self.running) + len(self.pending)}})

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
