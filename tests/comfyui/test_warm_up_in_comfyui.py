"""Warm Up in a real ComfyUI: the server answers while it compiles, and the run after it compiles nothing."""

from __future__ import annotations

import struct
from typing import Any

import legs
import pytest
import websocket
from waiting import wait_until

pytestmark = pytest.mark.comfyui

WIDTHS = {"a": 96, "b": 64, "c": 128}  # a leg would find what another one compiled, and compile nothing
HEIGHT = 64
LOADER: dict[str, Any] = {"model": "CogView3-Plus-3B", "precision": "fp32", "backend": "inductor", "offload": "none"}
WARM_UP: dict[str, Any] = {"pipeline": ["1", 0], "guidance": True, "precision": "inherit"}
ENCODE: dict[str, Any] = {"pipeline": ["2", 0], "prompt": "a kite", "negative_prompt": "", "precision": "inherit"}
SAMPLE: dict[str, Any] = {
    "height": HEIGHT,
    "pipeline": ["2", 0],
    "positive": ["3", 0],
    "negative": ["3", 1],
    "precision": "inherit",
    "steps": 2,
    "guidance_scale": 5.0,
    "seed": 7,
}
DECODE: dict[str, Any] = {
    "pipeline": ["2", 0],
    "latents": ["4", 0],
    "tiling": False,
    "slicing": False,
    "precision": "inherit",
}
TEXT_EVENT = 3  # of the websocket's binary messages: its number, the length of the node's id, the id, the text


def size_of(server: legs.Server) -> str:
    return f"{WIDTHS.get(server.leg.name, 160)}×{HEIGHT}"


def graph(server: legs.Server, *more: tuple[str, dict[str, Any]], sizes: str = "") -> dict[str, Any]:
    """sizes: to warm up for, the leg's own by default."""
    warm_up = WARM_UP | {"sizes": sizes or size_of(server)}
    made = {
        str(n): {"class_type": f"OneDiffGuard{name}", "inputs": given}
        for n, (name, given) in enumerate((("LoadPipeline", LOADER), ("WarmUp", warm_up), *more), start=1)
    }
    if more:
        made["6"] = {"class_type": "PreviewImage", "inputs": {"images": [str(len(made)), 0]}}
    return made


def run(server: legs.Server, prompt: dict[str, Any], client: str = "") -> tuple[dict[str, Any], int]:
    """What the history says of it in the end, and how often the server answered while it ran."""
    queued = server.ask("/prompt", {"prompt": prompt, "client_id": client})
    prompt_id = queued["prompt_id"]
    assert not queued["node_errors"], queued["node_errors"]
    answers = [0]

    def ended() -> bool:
        answers[0] += bool(server.ask("/queue")["queue_running"])
        return prompt_id in server.history()

    wait_until(ended, server.tail)
    told = server.history()[prompt_id]
    assert told["status"]["status_str"] == "success", told["status"]
    return told["outputs"], answers[0]


def texts_of(socket: websocket.WebSocket) -> list[str]:
    """Lines of text that nodes showed so far."""
    found = []
    socket.settimeout(1)
    while True:
        try:
            message = socket.recv()
        except websocket.WebSocketTimeoutException:
            return found
        if isinstance(message, bytes) and struct.unpack_from(">I", message)[0] == TEXT_EVENT:
            (length,) = struct.unpack_from(">I", message, 4)
            found.append(message[8 + length :].decode())


def test_the_server_answers_while_it_compiles_and_the_next_run_compiles_nothing(server: legs.Server) -> None:
    socket = websocket.create_connection(f"{server.url.replace('http', 'ws')}/ws?clientId=warm")
    outputs, answers = run(server, graph(server), "warm")
    texts = texts_of(socket)
    socket.close()
    (report,) = outputs["2"]["onediff_guard"]
    assert report["graphs"] == 1 and f"{size_of(server)}: " in outputs["2"]["text"][0]
    assert answers >= 3, "the event loop was free while the denoiser was compiled"
    shown = server.leg.name != "a"  # 0.0.1 shows no text on nodes
    for line in ("inductor: compiling block 1 of", "step 2/2"):
        assert any(f"{size_of(server)}: {line}" in text for text in texts) == shown, texts

    sample = SAMPLE | {"width": WIDTHS.get(server.leg.name, 160)}
    nodes = (("EncodePrompt", ENCODE), ("SampleCogView", sample), ("DecodeLatents", DECODE))
    sampled, _ = run(server, graph(server, *nodes))
    (report,) = sampled["4"]["onediff_guard"]
    assert report["graphs"] == 0 and report["backend"] == "inductor"


def test_a_size_that_cannot_be_is_named_and_the_next_run_works(server: legs.Server) -> None:
    wrong = graph(server, sizes=f"{size_of(server)}\n90×64")
    status = server.ended(server.ask("/prompt", {"prompt": wrong})["prompt_id"])["status"]
    assert status["status_str"] == "error"
    assert "has the line '90×64': width is 90, but must be a multiple of 32" in str(status)
    run(server, graph(server))
