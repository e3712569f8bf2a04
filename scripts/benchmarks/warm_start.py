"""Measure the time until a process has done its first step: compiled, loaded from an earlier process's cache, or eager.

    python scripts/benchmarks/warm_start.py [--blocks 6] [--rounds 3] [--before DIR] [--out DIR] [--folder DIR]

The model is a CogVideoX of the 2B model's width, at a small size. Each start is a separate process with its own
temporary folder, so it finds nothing but its cache. Starts are interleaved: each round starts every contestant once.
The processor time of the process and its compilers depends less on other load than the time of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import device_and_dtype, head, new_parser, opened, write_json

DTYPE = "fp32"  # fast on every CPU; a step's time is not measured
WARM, BEFORE = "compiled by an earlier process", "the same, in another checkout"
IMPORTED = "compiled elsewhere, and imported"
STARTS = {"eager": None, "compiled anew": 0, WARM: 1, IMPORTED: 1}  # → number of graphs that are found compiled


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=6, help="number of blocks; CogVideoX-2B has 30")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="a folder with another checkout, named comfyui_onediff_guard")
    parser.add_argument("--folder", type=Path, help="folder in which the model is made and removed again")
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(started(*args.start)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measured(make(Path(folder), args.blocks), Path(folder), args.rounds, args.before)
    for name, figures in result["median"].items():
        print(f"{name:32}", figures)
    print(f"written to {write_json(result, args.out, device_and_dtype()[0].type)}")


def make(folder: Path, blocks: int) -> Path:
    from comfyui_onediff_guard.demo.small_model import build_cogvideox
    from comfyui_onediff_guard.precision.dtypes import DTYPES

    return build_cogvideox(folder / "model", layers=blocks, heads=30, head_dim=64, dtype=DTYPES[DTYPE])


def measured(model: Path, folder: Path, rounds: int, before: Path | None) -> dict[str, Any]:
    names = [*STARTS, *([BEFORE] if before else [])]
    for name in (WARM, *names[len(STARTS) :]):  # fills the caches; not counted
        start_process(model, name, folder, before)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            told = start_process(model, name, folder, before)
            kept = STARTS.get(name, 1)
            if told["graphs"] is not None and told["kept"] != (kept and told["graphs"]):
                raise SystemExit(f"{name}: {told['kept']} of {told['graphs']} graphs came from the cache")
            print(name, told, file=sys.stderr)
            runs[name].append(told)
    return summary(runs, sum(file.stat().st_size for file in (folder / "compiled").rglob("*") if file.is_file()))


def summary(runs: dict[str, list[dict[str, Any]]], kept: int) -> dict[str, Any]:
    """Return the result. kept: bytes of compiled code."""
    facts = ("first step, s", "processor, s", "C++ compiler runs")
    return head("warm_start", device_and_dtype()[0], dtype=DTYPE) | {
        "parameters": runs["eager"][0]["parameters"],
        "rounds": len(runs["eager"]),
        "load average": round(os.getloadavg()[0], 1),  # of the machine: other processes, and this one
        "median": {name: {fact: round(median(found, fact), 2) for fact in facts} for name, found in runs.items()},
        "each": {
            name: {fact: [round(run[fact], 2) for run in found] for fact in facts} for name, found in runs.items()
        },
        "processor's seconds, × those of a warm start": {
            name: round(median(found, facts[1]) / median(runs[WARM], facts[1]), 2) for name, found in runs.items()
        },
        "bytes kept": kept,
    }


def median(runs: list[dict[str, Any]], fact: str) -> float:
    return statistics.median(run[fact] for run in runs)


def start_process(model: Path, name: str, folder: Path, before: Path | None) -> dict[str, Any]:
    """Run a start in a new process; return its output and its processor time."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        environment = {variable: value for variable, value in os.environ.items() if not variable.endswith("_CACHE_DIR")}
        environment["TMPDIR"] = temporary
        kept = {WARM: folder / "compiled", BEFORE: folder / "before"}.get(name, Path(temporary) / "compiled")
        if name == BEFORE:
            environment["PYTHONPATH"] = str(before)
        if name == IMPORTED:
            import_into(kept, folder / "compiled")
        command = [
            sys.executable,
            __file__,
            "--start",
            str(model),
            "eager" if name == "eager" else "inductor",
            str(kept),
        ]
        used = processor_seconds()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        return {**json.loads(done.stdout.splitlines()[-1]), "processor, s": processor_seconds() - used}


def import_into(kept: Path, compiled: Path) -> None:
    from comfyui_onediff_guard.pipelines.compile.cache import exportable, keep_imported, kept_folders

    keep_imported(kept, *exportable(kept_folders(compiled)[0]))


def processor_seconds() -> float:
    """Return the seconds of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def started(model: str, backend: str, compiled: str) -> dict[str, Any]:
    """Run the first step; called in the timed process."""
    built = []
    sys.addaudithook(
        lambda event, args: built.append(args) if event == "subprocess.Popen" and compiles(args[1]) else None
    )
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from comfyui_onediff_guard.precision.policy import Component

    handle = opened(Path(model), DTYPE, backend=backend, compiled=Path(compiled))
    with torch.inference_mode():  # like ComfyUI
        (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
        denoiser = handle.store.module("transformer", handle.plan(Component.DENOISER).dtype)
        begun = time.perf_counter()
        settings = SampleSettings(96, 64, frames=9, steps=1, seed=0, guidance_scale=6.0)
        report = sample(handle, positive, negative, settings)[1]
    return {
        "first step, s": time.perf_counter() - begun,
        "graphs": report.graphs,
        "kept": report.graphs_kept,
        "C++ compiler runs": len(built),
        "parameters": sum(parameter.numel() for parameter in denoiser.parameters()),
    }


def compiles(command: Any) -> bool:
    """Return whether a child process is a C++ compiler with something to compile."""
    words = [command] if isinstance(command, str) else [str(word) for word in command]
    return "g++" in words[0] and not {"--version", "-v"} & set(words)


if __name__ == "__main__":
    main()
