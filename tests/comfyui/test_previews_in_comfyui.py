"""Previews in a real ComfyUI: while a pipeline samples, the page gets a picture and a line of text for each step."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import legs
import pytest
import torch
import websocket
from comfyui_onediff_guard.comfyui_host import language
from families import small
from PIL import Image
from safetensors.torch import save_file
from waiting import HANG_SECONDS

pytestmark = pytest.mark.comfyui

PICTURE, TEXT = 1, 3  # numbers of the websocket's binary messages
HEADER = 8  # bytes before a picture
STEPS = 3


def run_and_record(server: legs.Server, workflow: str, **extra: Any) -> tuple[list[Image.Image], list[str]]:
    """Run a shipped workflow on small models. Return the pictures and texts that were sent to the page."""
    graph = small(legs.ROOT / "workflows" / "api" / f"{workflow}.json", server.ask("/object_info"))
    for node in graph.values():
        if "steps" in node["inputs"]:
            node["inputs"] |= {"steps": STEPS, "seed": time.time_ns() % 2**32}  # never a cached run
    pictures, texts = [], []
    with closing(websocket.create_connection(f"{server.url.replace('http', 'ws')}/ws?clientId=seen")) as socket:
        queued = server.ask("/prompt", {"prompt": graph, "client_id": "seen", "extra_data": extra})
        assert not queued["node_errors"], queued["node_errors"]
        for message in messages(socket):
            if isinstance(message, str):
                event = json.loads(message)
                if event["data"].get("prompt_id") == queued["prompt_id"] and is_final(event):
                    break
                continue
            (kind,) = struct.unpack_from(">I", message)
            if kind == PICTURE:
                pictures.append(Image.open(io.BytesIO(message[HEADER:])))
            elif kind == TEXT:
                (length,) = struct.unpack_from(">I", message, 4)
                texts.append(message[8 + length :].decode())
    status = server.history()[queued["prompt_id"]]["status"]
    assert status["status_str"] == "success", status["messages"][-1]
    return pictures, texts


def messages(socket: websocket.WebSocket) -> Iterator[str | bytes]:
    socket.settimeout(HANG_SECONDS)
    while True:
        yield socket.recv()


def is_final(event: dict[str, Any]) -> bool:
    return event["type"] == "execution_error" or (event["type"] == "executing" and event["data"].get("node") is None)


@pytest.mark.parametrize(
    "workflow", ["cogvideox_image_to_video", "svd_image_to_video", "cogview4_text_to_image", "wan_text_to_video"]
)
def test_each_step_sends_preview_and_progress_text(server: legs.Server, workflow: str) -> None:
    if server.leg.name != "a":  # an earlier test may have set another language
        for setting in language.SETTINGS:
            server.ask(f"/settings/{setting}", "en")
    pictures, texts = run_and_record(server, workflow)
    coloured = not workflow.startswith("cogview") and (server.leg.name != "a" or not workflow.startswith("wan"))
    assert len(pictures) == STEPS * coloured, "previews if factors are published, whatever the default is"
    assert len({picture.size for picture in pictures}) == coloured
    if server.leg.name != "a":  # 0.0.1 does not enlarge previews, and shows no text on nodes
        assert not pictures or max(pictures[0].size) == 512
        steps = [text for text in texts if text.startswith("step ")]
        for n, text in enumerate(steps, start=1):
            assert text.startswith((f"step {n}/{STEPS} · fp", f"step {n}/{STEPS} · bf16")), text
        assert len(steps) == STEPS and "left" in steps[1] and "left" not in steps[-1]


def test_preview_method_none_sends_no_preview(server: legs.Server) -> None:
    if server.leg.name == "a":
        pytest.skip("this ComfyUI's page has no such setting")
    pictures, _ = run_and_record(server, "svd_image_to_video", preview_method="none")
    assert not pictures


def test_preview_method_taesd_uses_comfyuis_taesd_decoder(server: legs.Server) -> None:
    if server.leg.name != "c":
        pytest.skip("this ComfyUI's page has no such setting")
    folder = server.base / "models" / "vae_approx"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "taesd_decoder.safetensors"
    save_file(taesd_weights(), file)
    try:
        (first, *_), _ = run_and_record(server, "svd_image_to_video", preview_method="taesd")
        (plain, *_), _ = run_and_record(server, "svd_image_to_video", preview_method="auto")
    finally:
        file.unlink()
    assert first.tobytes() != plain.tobytes()
    flat = [len(picture.resize((8, 8)).getcolors(64)) for picture in (first, plain)]
    assert flat[0] == 1 < flat[1], "TAESD's zero weights give one colour"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [part for _ in range(3) for part in (torch.nn.Conv2d(64, 64, 3), torch.nn.ReLU())]
        self.conv = torch.nn.Sequential(*parts[:-1])


def taesd_weights() -> dict[str, torch.Tensor]:
    """Weights of ComfyUI's TAESD decoder, all zero: every latent becomes one colour."""
    none, between = torch.nn.Identity(), torch.nn.Conv2d(64, 64, 3, bias=False)
    level = [Block(), Block(), Block(), none, between]
    first, last = torch.nn.Conv2d(4, 64, 3), torch.nn.Conv2d(64, 3, 3)
    decoder = torch.nn.Sequential(none, first, none, *level, *level, *level, Block(), last)
    return {name: torch.zeros(weight.shape) for name, weight in decoder.state_dict().items()}
