"""What a real ComfyUI sends its pages while a pipeline samples: a picture and a line of text for each step."""

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


def seen(server: legs.Server, workflow: str, **extra: Any) -> tuple[list[Image.Image], list[str]]:
    """Queue a shipped workflow on small models. Returns the pictures and the texts that its page was sent."""
    graph = small(legs.ROOT / "workflows" / "api" / f"{workflow}.json", server.ask("/object_info"))
    for node in graph.values():
        if "steps" in node["inputs"]:
            node["inputs"] |= {"steps": STEPS, "seed": time.time_ns() % 2**32}  # never a run that is remembered
    pictures, texts = [], []
    with closing(websocket.create_connection(f"{server.url.replace('http', 'ws')}/ws?clientId=seen")) as socket:
        queued = server.ask("/prompt", {"prompt": graph, "client_id": "seen", "extra_data": extra})
        assert not queued["node_errors"], queued["node_errors"]
        for message in messages(socket):
            if isinstance(message, str):
                told = json.loads(message)
                if told["data"].get("prompt_id") == queued["prompt_id"] and is_the_end(told):
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


def is_the_end(told: dict[str, Any]) -> bool:
    return told["type"] == "execution_error" or (told["type"] == "executing" and told["data"].get("node") is None)


@pytest.mark.parametrize(
    "workflow", ["cogvideox_image_to_video", "svd_image_to_video", "cogview4_text_to_image", "wan_text_to_video"]
)
def test_each_step_sends_a_picture_and_a_line(server: legs.Server, workflow: str) -> None:
    if server.leg.name != "a":  # a page in another language may have been open before
        for setting in language.SETTINGS:
            server.ask(f"/settings/{setting}", "en")
    pictures, texts = seen(server, workflow)
    coloured = not workflow.startswith("cogview") and (server.leg.name != "a" or not workflow.startswith("wan"))
    assert len(pictures) == STEPS * coloured, "whatever the command line's default is, where factors are published"
    assert len({picture.size for picture in pictures}) == coloured
    if server.leg.name != "a":  # 0.0.1 enlarges no picture, and shows no text on nodes
        assert not pictures or max(pictures[0].size) == 512
        steps = [text for text in texts if text.startswith("step ")]
        for n, text in enumerate(steps, start=1):
            assert text.startswith((f"step {n}/{STEPS} · fp", f"step {n}/{STEPS} · bf16")), text
        assert len(steps) == STEPS and "left" in steps[1] and "left" not in steps[-1]


def test_none_is_honoured_where_the_page_asks_for_it(server: legs.Server) -> None:
    if server.leg.name == "a":
        pytest.skip("no page could ask for it yet")
    pictures, _ = seen(server, "svd_image_to_video", preview_method="none")
    assert not pictures


def test_comfyuis_own_small_decoder_is_used_where_it_is_asked_for(server: legs.Server) -> None:
    if server.leg.name != "c":
        pytest.skip("no page could ask for it yet")
    folder = server.base / "models" / "vae_approx"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "taesd_decoder.safetensors"
    save_file(taesd_weights(), file)
    try:
        (first, *_), _ = seen(server, "svd_image_to_video", preview_method="taesd")
        (plain, *_), _ = seen(server, "svd_image_to_video", preview_method="auto")
    finally:
        file.unlink()
    assert first.tobytes() != plain.tobytes()
    flat = [len(picture.resize((8, 8)).getcolors(64)) for picture in (first, plain)]
    assert flat[0] == 1 < flat[1], "one colour"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [part for _ in range(3) for part in (torch.nn.Conv2d(64, 64, 3), torch.nn.ReLU())]
        self.conv = torch.nn.Sequential(*parts[:-1])


def taesd_weights() -> dict[str, torch.Tensor]:
    """A decoder of ComfyUI's TAESD, of zeros: it decodes all to one colour."""
    none, between = torch.nn.Identity(), torch.nn.Conv2d(64, 64, 3, bias=False)
    level = [Block(), Block(), Block(), none, between]
    first, last = torch.nn.Conv2d(4, 64, 3), torch.nn.Conv2d(64, 3, 3)
    decoder = torch.nn.Sequential(none, first, none, *level, *level, *level, Block(), last)
    return {name: torch.zeros(weight.shape) for name, weight in decoder.state_dict().items()}
