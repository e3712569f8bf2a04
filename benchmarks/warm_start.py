"""What a process pays before its first step is done: compiled anew, compiled by an earlier process, or not compiled.

    python benchmarks/warm_start.py [--blocks 6] [--rounds 3] [--out benchmarks/results] [--folder DIR]

A CogVideoX of the 2B model's width, at a small size. Each start is a process of its own with a temporary folder of its
own, so that nothing is there but what its cache brings: this project's, a folder that was exported to inductor, or a
file of `torch.compiler.save_cache_artifacts`. Interleaved: each round starts every contestant once, and the warm one
twice, which gives the noise.

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
FOLDER, ARTIFACTS = "inductor's folder", "saved artifacts"  # of PyTorch's own
WARM = ("warm cache", "warm cache again", FOLDER, ARTIFACTS)
STARTS = ("eager", "no cache", *WARM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help="of CogVideoX-2B's 30")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help="where the model is made, and removed again")
    parser.add_argument("--start", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(started(*args.start)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measured(make(Path(folder), args.blocks), Path(folder), args.rounds)
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


def measured(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    compiled = folder / "compiled"
    for name in ("warm cache", FOLDER, ARTIFACTS):  # fills the caches; not counted
        start_process(model, name, folder)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in STARTS}
    for round_number in range(rounds):
        turn = round_number % len(STARTS)
        for name in STARTS[turn:] + STARTS[:turn]:
            told = start_process(model, name, folder)
            expected = {"eager": None, "no cache": 0}.get(name, told["graphs"])
            if told["graphs"] is not None and told["kept"] != expected:
                raise SystemExit(f"{name}: {told['kept']} of {told['graphs']} graphs came from the cache")
            runs[name].append(told)
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    medians = {
        name: {part: round(statistics.median(run[part] for run in found), 2) for part in found[0]}
        for name, found in seconds.items()
    }
    until_step: dict[str, list[float]] = {
        name: [sum(run[part] for part in PARTS[:3]) for run in found] for name, found in seconds.items()
    }
    first_step: dict[str, list[float]] = {name: [run["first step"] for run in found] for name, found in seconds.items()}
    extra: dict[str, list[float]] = {
        name: [run["first step"] - run["second step"] for run in found] for name, found in seconds.items()
    }
    added = [warm - eager for warm, eager in zip(extra["warm cache"], extra["eager"], strict=True)]
    device, _ = device_and_dtype()
    return {
        "benchmark": "warm_start",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "dtype": DTYPE,
        "parameters": runs["eager"][0]["parameters"],
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
        "first step, × the warm cache's": {
            name: {"median": ratio(first_step, name, WARM[0]), "each": ratios(first_step, name, WARM[0])}
            for name in WARM[1:]
        },
        "C++ compiler runs": {name: [run["built"] for run in found] for name, found in runs.items()},
        "exit status where libraries were cut short": {FOLDER: cut_short(model, folder)},
        "bytes kept": sum(file.stat().st_size for file in compiled.iterdir()),
    }


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    return round(statistics.median(ratios(seconds, ours, theirs)), 2)


def ratios(seconds: dict[str, list[float]], ours: str, theirs: str) -> list[float]:
    return [round(a / b, 2) for a, b in zip(seconds[ours], seconds[theirs], strict=True)]


def start_process(model: Path, name: str, folder: Path) -> dict[str, Any]:
    """What a new process told."""
    done = run_process(model, name, folder)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def cut_short(model: Path, folder: Path) -> int:
    """The exit status of a start from inductor's folder where libraries are a page long, as a compiler that is killed
    may leave them. Less than 0: the signal that ended it."""
    for library in (folder / "inductor").glob("*/*.main.so"):
        os.truncate(library, 4096)
    return run_process(model, FOLDER, folder).returncode


def run_process(model: Path, name: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    with tempfile.TemporaryDirectory(dir=model.parent) as temporary:
        environment = {variable: value for variable, value in os.environ.items() if not variable.endswith("_CACHE_DIR")}
        environment["TMPDIR"] = temporary
        if name in (FOLDER, ARTIFACTS):
            environment["TORCHINDUCTOR_CACHE_DIR"] = str((folder if name == FOLDER else Path(temporary)) / "inductor")
        backend = "eager" if name == "eager" else "inductor"
        compiled = folder / "compiled" if name.startswith(WARM[0]) else ""
        artifacts = folder / "artifacts" if name == ARTIFACTS else ""
        begun = str(time.time())
        command = [sys.executable, __file__, "--start", str(model), backend, str(compiled), str(artifacts), begun]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)


def started(model: str, backend: str, compiled: str, artifacts: str, begun: str) -> dict[str, Any]:
    """In the process that is timed.

    artifacts: a file of what PyTorch saves: loaded before the model, or where there is none written at the end.
    begun: when its parent started it, in seconds of the epoch.
    """
    clock, built, saved = [float(begun)], [], Path(artifacts)
    sys.addaudithook(
        lambda event, args: built.append(args) if event == "subprocess.Popen" and compiles(args[1]) else None
    )
    import diffusers
    from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.handle import load
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
    from comfyui_onediff_guard.precision.policy import Component, Precision

    _ = diffusers.CogVideoXPipeline, diffusers.CogVideoXTransformer3DModel
    clock.append(time.time())
    if artifacts and saved.exists():
        torch.compiler.load_cache_artifacts(saved.read_bytes())
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
    if artifacts and not saved.exists() and (made := torch.compiler.save_cache_artifacts()):
        saved.write_bytes(made[0])
    return {
        "seconds": dict(zip(PARTS, (b - a for a, b in itertools.pairwise(clock)), strict=True)),
        "graphs": reports[0].graphs,
        "kept": reports[0].graphs_kept,
        "built": len(built),
        "parameters": sum(parameter.numel() for parameter in denoiser.parameters()),
    }


def compiles(command: Any) -> bool:
    """Whether a child process is a C++ compiler that is given something to compile."""
    words = [command] if isinstance(command, str) else [str(word) for word in command]
    return "g++" in words[0] and not {"--version", "-v"} & set(words)


if __name__ == "__main__":
    main()
