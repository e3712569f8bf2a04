"""Toy jobs that only sleep, to test the batch command itself: the command with two additional nodes.

Everything else is real: job file, Ray's processes, outputs, resuming. Run `python -c "import toy_jobs;
toy_jobs.main()" batch JOBS.jsonl …` with this folder on PYTHONPATH.
"""

# ruff: noqa: N802 - ComfyUI's names

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from comfyui_onediff_guard.headless.commands import batch, cli
from comfyui_onediff_guard.headless.files import resolve_prefix, write_counted
from comfyui_onediff_guard.headless.hosts import local
from comfyui_onediff_guard.headless.hosts.chosen import Host
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.workflow import graph as graphs
from comfyui_onediff_guard.headless.workflow.graph import Graph
from comfyui_onediff_guard.headless.workflow.schema import Schema
from comfyui_onediff_guard.headless.workflow.validate import known_schemas


class Busy:
    """Sleeps for `seconds`, and until the number in the file `gate` is above its seed."""

    CATEGORY = "toys"
    RETURN_TYPES = ("STRING",)
    FUNCTION = "work"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "seconds": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 1000.0}),
                "gate": ("STRING", {"default": ""}),
                "model": ("STRING", {"default": "a"}),
                "width": ("INT", {"default": 64, "min": 1, "max": 10000}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**63}),
                "log": ("STRING", {"default": ""}),
                "fault": (["none", "dies", "raises"],),
            }
        }

    def work(self, seconds: float, gate: str, model: str, width: int, seed: int, log: str, fault: str) -> tuple[str]:
        if log:
            start = {"seed": seed, "pid": os.getpid(), "host": socket.gethostname(), "at": time.time()}
            with open(log, "a", encoding="utf-8") as stream:  # noqa: PTH123 - one write, which appends whole
                stream.write(f"{json.dumps(start)}\n")
        if fault == "dies":
            os.kill(os.getpid(), 9)
        if fault == "raises":
            raise ValueError("a toy's fault")
        time.sleep(seconds)
        while gate and int(Path(gate).read_text() or 0) <= seed:
            time.sleep(0.05)
        return (f"{model} {width} {seed}",)


class SaveSlowly:
    """Writes three files, with a pause before each."""

    CATEGORY = "toys"
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "text": ("STRING", {"forceInput": True}),
                "pause": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 1000.0}),
            }
        }

    def save(self, text: str, pause: float) -> dict[str, Any]:
        from comfyui_onediff_guard.comfyui_host import host

        folder, stem = resolve_prefix(host.output_directory(), "toy")
        names = []
        for part in range(3):
            time.sleep(pause)
            names.append(write_counted(folder, stem, ".txt", f"{text} {part}".encode()).name)
        return {"ui": {"texts": [{"filename": name, "subfolder": "", "type": "output"} for name in names]}}


TOYS: dict[str, type] = {"Busy": Busy, "SaveSlowly": SaveSlowly}


def read(workflow: Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
    graph = graphs.from_api(workflow)
    return graph, known_schemas(graph.class_types(), TOYS)


def run(graph: Graph, **options: Any) -> RunResult:
    return local.run_local(graph, classes=TOYS, **options)


def workflow(**busy: Any) -> dict[str, Any]:
    inputs = {"seconds": 0.0, "gate": "", "model": "a", "width": 64, "seed": 0, "log": "", "fault": "none"}
    pause = busy.pop("pause", 0.0)
    return {
        "1": {"class_type": "Busy", "inputs": {**inputs, **busy}},
        "2": {"class_type": "SaveSlowly", "inputs": {"text": ["1", 0], "pause": pause}},
    }


def write_jobs(file: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return file


def main() -> None:
    """The command with the toy nodes."""
    batch.LOCAL = Host(read, run)
    sys.exit(cli.main())
