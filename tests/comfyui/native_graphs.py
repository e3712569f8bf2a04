"""The shipped workflow for SD 1.5 with ComfyUI's own nodes, at a small size, with or without its guard; and runs of
it."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import comfyui_nodes
import legs
import numpy as np
from runs import finish, frames_of, start
from templates import api_file, read

NAME, LOADER = "native_sd15_text_to_image", "CheckpointLoaderSimple"
FILE, HOT = comfyui_nodes.SD15_FILE, "overflowing_"  # in models/checkpoints; the prefix of one that overflows
SIZE = (1, 16, 16)  # frames, height, width
GUARD = "OneDiffGuardNaNGuardNative"
GUARDED = ("model", "vae")
SMALL = {"width": 16, "height": 16, "steps": 2}
Graph = dict[str, Any]


@dataclass(frozen=True)
class RunOutput:
    frames: np.ndarray  # [frames, height, width, 3], uint8
    reports: list[str]  # the guards' lines in ComfyUI's log

    def report(self, start: str) -> str:
        (found,) = [line for line in self.reports if line.startswith(start)]
        return found


def graph(*, hot: bool = False, half: bool = False, without: Container[str] = ()) -> Graph:
    """The shipped API file at a small size. hot: on the overflowing checkpoint. without: "model", "vae": unguarded."""
    found = read(api_file(NAME))
    for node in found.values():
        node["inputs"] |= {key: value for key, value in SMALL.items() if key in node["inputs"]}
    (loader,) = [id_ for id_, node in found.items() if node["class_type"] == LOADER]
    found[loader]["inputs"]["ckpt_name"] = HOT * hot + FILE
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


def make(server: legs.Server, graph: Graph) -> RunOutput:
    file, before = server.base / "workflow.json", len(server.log_text())
    file.write_text(json.dumps(graph), encoding="utf-8")
    ran = finish(start(server, file, server.base), server)
    assert ran.code == 0, (ran.answer, server.tail())
    (saved,) = ran.files
    log = server.log_text()[before:].splitlines()
    return RunOutput(frames_of(saved), [line.split("NaN Guard: ", 1)[1] for line in log if "NaN Guard: " in line])
