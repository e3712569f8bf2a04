"""What a process pays before its first step is done: compiled anew, compiled by an earlier process, or not compiled.

    python benchmarks/warm_start.py [--blocks 6] [--rounds 3] [--out benchmarks/results] [--folder DIR]

A CogVideoX of the 2B model's width, at a small size. Each start is a process of its own with a temporary folder of its
own, so that nothing is there but what the compile cache brings. Interleaved: each round starts every contestant once.

What a start adds is its first step less its second, beyond what that is in a process that does not compile.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, device_and_dtype, machine, write_json

LIMIT = 10.0  # seconds that a warm start may add to an eager one
DTYPE = "fp32"  # which every CPU computes fast; a step's time is no part of what is measured
PARTS = ("import", "load", "first step", "second step")
STARTS = {"eager": "eager", "no cache": "inductor", "warm cache": "inductor"}  # contestant → backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help="of CogVideoX-2B's 30")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help="where the model is made, and removed again")
    parser.add_argument("--start", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(started(*args.start)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measured(make(Path(folder), args.blocks), Path(folder) / "compiled", args.rounds)
    for name, figures in result["median_seconds"].items():
        print(f"{name:12}", ", ".join(f"{part} {seconds:.2f} s" for part, seconds in figures.items()))
    added = result["seconds that a warm start adds to an eager one"]
    print(
        f"a warm start adds {added} s; compiling anew takes {result['ratios']['no cache / warm cache']} × a warm start"
    )
    print(f"written to {write_json(result, args.out, device_and_dtype()[0].type)}")
    if added > LIMIT:
        sys.exit(f"beyond {LIMIT} s")


def make(folder: Path, blocks: int) -> Path:
    from comfyui_onediff_guard.demo.small_model import build_cogvideox
    from comfyui_onediff_guard.precision.dtypes import DTYPES

    return build_cogvideox(folder / "model", layers=blocks, heads=30, head_dim=64, dtype=DTYPES[DTYPE])


def measured(model: Path, compiled: Path, rounds: int) -> dict[str, Any]:
    start_process(model, "inductor", compiled)  # fills the cache; not counted
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in STARTS}
    names, parameters = list(STARTS), 0
    for round_number in range(rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            told = start_process(model, STARTS[name], compiled if name == "warm cache" else None)
            expected = {"eager": None, "no cache": 0, "warm cache": told["graphs"]}[name]
            if told["graphs"] is not None and told["kept"] != expected:
                raise SystemExit(f"{name}: {told['kept']} of {told['graphs']} graphs came from the cache")
            seconds[name].append(told["seconds"])
            parameters = told["parameters"]
    medians = {
        name: {part: round(statistics.median(run[part] for run in runs), 2) for part in runs[0]}
        for name, runs in seconds.items()
    }
    until_step = {name: [sum(run[part] for part in PARTS[:3]) for run in runs] for name, runs in seconds.items()}
    extra = {name: [run["first step"] - run["second step"] for run in runs] for name, runs in seconds.items()}
    added = [warm - eager for warm, eager in zip(extra["warm cache"], extra["eager"], strict=True)]
    device, _ = device_and_dtype()
    return {
        "benchmark": "warm_start",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "dtype": DTYPE,
        "parameters": parameters,
        "rounds": rounds,
        "load average": round(os.getloadavg()[0], 1),  # of the machine: others' work, and this
        "median_seconds": medians,
        "seconds that a warm start adds to an eager one": round(statistics.median(added), 2),
        "limit": LIMIT,
        "ratios": {
            "no cache / warm cache": ratio(until_step, "no cache", "warm cache"),
            "warm cache / eager": ratio(until_step, "warm cache", "eager"),
            "no cache / eager": ratio(until_step, "no cache", "eager"),
        },
        "bytes kept": sum(file.stat().st_size for file in compiled.iterdir()),
    }


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    return round(statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)), 2)


def start_process(model: Path, backend: str, compiled: Path | None) -> dict[str, Any]:
    """What a new process told."""
    with tempfile.TemporaryDirectory(dir=model.parent) as temporary:
        inherited = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}
        command = [sys.executable, __file__, "--start", str(model), backend, str(compiled or ""), str(time.time())]
        done = subprocess.run(command, env=inherited | {"TMPDIR": temporary}, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def started(model: str, backend: str, compiled: str, begun: str) -> dict[str, Any]:
    """In the process that is timed. begun: when its parent started it, in seconds of the epoch."""
    clock = [float(begun)]
    import diffusers
    from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.handle import load
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
    from comfyui_onediff_guard.precision.policy import Component, Precision

    _ = diffusers.CogVideoXPipeline, diffusers.CogVideoXTransformer3DModel
    clock.append(time.time())
    handle = load(
        Path(model),
        COGVIDEOX,
        precision=Precision(DTYPE),
        backend=backend,
        offload="none",
        placement=PlainPlacement(),
        compiled=Path(compiled) if compiled else None,
    )
    with torch.inference_mode():  # as ComfyUI runs its nodes
        (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
        denoiser = handle.store.module("transformer", handle.plan(Component.DENOISER).dtype)
        clock.append(time.time())
        reports = []
        for _ in range(2):
            settings = SampleSettings(96, 64, frames=9, steps=1, seed=0, guidance_scale=6.0)
            reports.append(sample(handle, positive, negative, settings)[1])
            clock.append(time.time())
    return {
        "seconds": dict(zip(PARTS, (b - a for a, b in itertools.pairwise(clock)), strict=True)),
        "graphs": reports[0].graphs,
        "kept": reports[0].graphs_kept,
        "parameters": sum(parameter.numel() for parameter in denoiser.parameters()),
    }


if __name__ == "__main__":
    main()
