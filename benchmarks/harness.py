"""Runs the stages of stages.py, each in a process of its own, and puts what they find into one JSON and one table.

A stage that dies takes nothing with it: the file is written after each, and a later run on the same machine and day
adds to it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import table
import torch
from contestants import GROUPS
from denoisers import MODELS
from measure import RESULTS, machine, write_json
from stages import CONTESTANTS, FIRST

STAGES = (*GROUPS, "compile", "attention", "profile")
SHORT = {"rerun": 4, "attention": 2}  # their rounds: that part of the others'


def arguments(description: str | None, models: Iterable[str], stages: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(models))
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(stages), dest="stages")
    parser.add_argument("--rounds", type=int, default=20, help="of all contestants, interleaved; rerun has a quarter")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def measure(benchmark: str, args: argparse.Namespace, size: str) -> dict[str, Any]:
    """Run the stages on the models, print the tables, and return what is in the JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = _before(_head(benchmark, device, size), args.out, device)
    file = args.out
    with tempfile.TemporaryDirectory() as caches:
        for name in args.models:
            for stage in args.stages:
                started = time.perf_counter()
                made = _stage(stage, name, size, max(2, args.rounds // SHORT.get(stage, 1)), Path(caches))
                if isinstance(made, str):
                    made = _text(made, args.out, f"{benchmark}-profile-{device.type}-{result['date']}-{name}.txt")
                result["models"].setdefault(name, {})[stage] = made
                file = write_json(result, args.out, device.type)
                print(f"{name}, {stage}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(table.text(result))
    print(f"written to {file}")
    return result


def _head(benchmark: str, device: torch.device, size: str) -> dict[str, Any]:
    import diffusers

    return {
        "benchmark": benchmark,
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "size": size,
        "models": {},
    }


def _before(head: dict[str, Any], folder: Path, device: torch.device) -> dict[str, Any]:
    """The head, with what an earlier run of the same day, machine and versions found."""
    file = folder / f"{head['benchmark']}-{device.type}-{head['date']}.json"
    if not file.exists():
        return head
    found = json.loads(file.read_text(encoding="utf-8"))
    same = all(found.get(name) == value for name, value in head.items() if name != "models")
    return found if same else head


def _stage(stage: str, model: str, size: str, rounds: int, caches: Path) -> Any:
    if stage != "compile":
        return _child(stage, model, size, rounds, caches / "shared")
    if size == "cut" and "deep" in MODELS[model].sizes:
        size = "deep"  # what compiling a whole model takes hangs on the number of its blocks
    return {name: _cold_and_warm(name, model, size, caches / f"{model}-{i}") for i, name in enumerate(CONTESTANTS)}


def _cold_and_warm(contestant: str, model: str, size: str, cache: Path) -> dict[str, Any]:
    """The first step's compiling with an empty cache, and in a second process with the cache that the first filled."""
    return {state: _child(FIRST, model, size, 1, cache, "--contestant", contestant) for state in ("cold", "warm")}


def _child(stage: str, model: str, size: str, rounds: int, cache: Path, *more: str) -> Any:
    """What a process of its own finds, or how it died."""
    places = {name: cache / name.lower() for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    file = cache / "result"
    file.unlink(missing_ok=True)
    given = [stage, model, "--size", size, "--rounds", str(rounds), "--result", str(file), *more]
    command = [sys.executable, str(Path(__file__).with_name("stages.py")), *given]
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    if done.returncode:
        return {"error": f"exit code {done.returncode}: {_reason(done.stderr)}"}
    found = file.read_text(encoding="utf-8")
    return found if stage == "profile" else json.loads(found)


def _reason(stderr: str) -> str:
    """The last line that names an error; what libraries add behind it is left out."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no message"]
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Unavailable)\b", line)), lines[-1]
    )


def _text(text: str, folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return name
