"""The shipped workflows for ComfyUI's own models: small, with and without their guards, and what a run of one made."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import comfyui_nodes
import legs
import native_checkpoints
import numpy as np
from runs import Ran, finish, frames_of, start
from templates import api_file

GUARD = "OneDiffGuardNaNGuardNative"
GUARDED = ("model", "vae")
SMALL = {"width": 16, "height": 16, "steps": 2}
HOT = "overflowing_"
Graph = dict[str, Any]


@dataclass(frozen=True)
class Case:
    file: str  # in models/checkpoints, and in the workflow
    loader: str
    model: str  # ComfyUI's class, as the report names it
    vae: str
    size: tuple[int, int, int]  # frames, height, width
    write: Callable[..., None]


CASES = {
    "native_sd15_text_to_image": Case(
        comfyui_nodes.SD15_FILE,
        "CheckpointLoaderSimple",
        "SD15",
        "AutoencoderKL",
        (1, 16, 16),
        native_checkpoints.write_sd15,
    ),
}


@dataclass(frozen=True)
class Made:
    frames: np.ndarray  # [frames, height, width, 3], uint8
    reports: list[str]  # the guards' lines in ComfyUI's log

    def report(self, start: str) -> str:
        (found,) = [line for line in self.reports if line.startswith(start)]
        return found


def graph(name: str, *, hot: bool = False, half: bool = False, without: Container[str] = ()) -> Graph:
    """The shipped API file, small. hot: on the overflowing checkpoint. without: "model", "vae": what is not guarded."""
    found: Graph = json.loads(api_file(name).read_text(encoding="utf-8"))
    case = CASES[name]
    for node in found.values():
        node["inputs"] |= {key: value for key, value in SMALL.items() if key in node["inputs"]}
    (loader,) = [id_ for id_, node in found.items() if node["class_type"] == case.loader]
    found[loader]["inputs"]["ckpt_name"] = HOT * hot + case.file
    if half:
        _relink(found, [loader, 0], ["half", 0])
        found["half"] = {"class_type": "ModelComputeDtype", "inputs": {"model": [loader, 0], "dtype": "fp16"}}
    (guard,) = (id_ for id_, node in found.items() if node["class_type"] == GUARD)
    for slot, name in enumerate(GUARDED):
        if name in without:
            _relink(found, [guard, slot], found[guard]["inputs"].pop(name))
    if not found[guard]["inputs"].keys() & set(GUARDED):
        del found[guard]
    return found


def _relink(graph: Graph, old: list[Any], new: list[Any]) -> None:
    for node in graph.values():
        node["inputs"] |= {name: new for name, value in node["inputs"].items() if value == old}


def run(server: legs.Server, graph: Graph) -> Ran:
    file = server.base / "workflow.json"
    file.write_text(json.dumps(graph), encoding="utf-8")
    return finish(start(server, file, server.base), server)


def make(server: legs.Server, graph: Graph) -> Made:
    before = len(server.log_text())
    ran = run(server, graph)
    assert ran.code == 0, (ran.answer, server.tail())
    (saved,) = ran.files
    said = server.log_text()[before:].splitlines()
    return Made(frames_of(saved), [line.split("NaN Guard: ", 1)[1] for line in said if "NaN Guard: " in line])
