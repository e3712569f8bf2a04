"""Runs the stages of stages.py, each in a process of its own, and puts what they find into one JSON and one table.

A stage that dies takes nothing with it: the file is written after each, and a later run on the same machine and day
adds to it. One that takes too long is ended, and what it had found is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import table
import torch
from budget import SECONDS, Budget
from denoisers import MODELS
from entrants import GROUPS, not_for
from measure import CLOCK, head, new_parser, write_json
from stages import CONTESTANTS, FIRST, OTHERS

STAGES = (*GROUPS, "compile", *OTHERS)
LATE = 30  # seconds behind its time, after which a stage is ended
ENDED = 124  # as `timeout` says it


def arguments(description: str | None, models: Iterable[str], stages: Iterable[str]) -> argparse.ArgumentParser:
    parser = new_parser(description)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, "all"], default=list(models))
    parser.add_argument("--stage", nargs="+", choices=[*STAGES, "all"], default=list(stages), dest="stages")
    parser.add_argument("--rounds", type=int, default=20, help="of all contestants, interleaved: at most")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each stage of each model")
    return parser


class Limits(NamedTuple):
    """Of a stage."""

    rounds: int
    seconds: float


def measure(benchmark: str, args: argparse.Namespace, size: str) -> dict[str, Any]:
    """Run the stages on the models, print the tables, and return what is in the JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    new = head(benchmark, device, clock=CLOCK, diffusers=diffusers.__version__, size=size, models={})
    result = _before(new, args.out, device)
    file = args.out
    asked = (args.models, MODELS), (args.stages, STAGES)
    models, stages = (every if "all" in some else some for some, every in asked)
    with tempfile.TemporaryDirectory() as caches:
        for name, stage in ((name, stage) for name in models for stage in stages):
            if why := not_for(stage, MODELS[name]):
                print(f"{name}, {stage}: not run, {why}", file=sys.stderr)
                continue
            started = time.perf_counter()
            found = _stage(stage, name, size, Limits(args.rounds, args.seconds), Path(caches))
            made = found["made"]
            if isinstance(made, str):
                made = _text(made, args.out, f"{benchmark}-profile-{device.type}-{result['date']}-{name}.txt")
            of_model = result["models"].setdefault(name, {})
            of_model[stage] = made
            of_model.setdefault("card", {})[stage] = found.get("card")
            file = write_json(result, args.out, device.type)
            print(f"{name}, {stage}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(table.text(result))
    print(f"written to {file}")
    return result


def _before(head: dict[str, Any], folder: Path, device: torch.device) -> dict[str, Any]:
    """The head, with what an earlier run of the same day, machine and versions found."""
    file = folder / f"{head['benchmark']}-{device.type}-{head['date']}.json"
    if not file.exists():
        return head
    found = json.loads(file.read_text(encoding="utf-8"))
    same = all(found.get(name) == value for name, value in head.items() if name != "models")
    return found if same else head


def _stage(stage: str, model: str, size: str, limits: Limits, caches: Path) -> dict[str, Any]:
    """What its process wrote: "made", and how the card stood before and after."""
    if stage != "compile":
        return _child(stage, model, size, limits, caches / "shared")
    if size == "cut" and "deep" in MODELS[model].sizes:
        size = "deep"  # what compiling a whole model takes hangs on the number of its blocks
    budget, made, card = Budget(limits.seconds), dict[str, Any](), None
    for number, name in enumerate(CONTESTANTS):
        made[name] = {}
        for state in ("cold", "warm"):  # with an empty cache, then with what the first process left in it
            left = Limits(1, limits.seconds - budget.spent)
            if left.seconds <= 0:
                made[name][state] = {"error": "left out: the stage's time was over"}
                continue
            found = _child(FIRST, model, size, left, caches / f"{model}-{number}", "--contestant", name)
            made[name][state], card = found["made"], found.get("card")
    return {"made": made, "card": card}


def _child(stage: str, model: str, size: str, limits: Limits, cache: Path, *more: str) -> dict[str, Any]:
    """What a process of its own found, or how it died. What it found before it died is kept."""
    places = {name: cache / name.lower() for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    file = cache / "result"
    file.unlink(missing_ok=True)
    given = [stage, model, "--size", size, "--rounds", str(limits.rounds), "--seconds", str(limits.seconds)]
    command = [sys.executable, str(Path(__file__).with_name("stages.py")), *given, "--result", str(file), *more]
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}}
    code, stderr = _ended(command, environment, limits.seconds + LATE)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"made": {}}
    if code:
        found["made"] = {**found["made"], "error": f"exit code {code}: {_reason(stderr)}"}
    return found


def _ended(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Exit code and standard error of a process that is ended, with those that it started, when its time is over."""
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=os.name == "posix", **pipes) as process:
        try:
            _, stderr = process.communicate(timeout=seconds)
            return process.returncode, stderr
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return ENDED, f"TimeoutError: not done after {seconds:.0f} s"
        except BaseException:
            _kill(process)
            raise


def _kill(process: subprocess.Popen[str]) -> None:
    """With the compiler's own processes, where that can be said at once."""
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


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
