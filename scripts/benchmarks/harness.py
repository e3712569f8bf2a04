"""Run the stages of stages.py, each in its own process, and write their results to one JSON and one table.

A stage that crashes loses no other results: the file is written after each stage, and a later run on the same machine
and day adds to it. A stage that takes too long is ended, and its results so far are kept.
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
LATE = 30  # seconds after its time limit, before a stage is ended
ENDED = 124  # exit code, as of `timeout`


def arguments(description: str | None, models: Iterable[str], stages: Iterable[str]) -> argparse.ArgumentParser:
    parser = new_parser(description)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, "all"], default=list(models))
    parser.add_argument("--stage", nargs="+", choices=[*STAGES, "all"], default=list(stages), dest="stages")
    parser.add_argument("--rounds", type=int, default=20, help="most rounds of all contestants, interleaved")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit for each stage of each model")
    return parser


class Limits(NamedTuple):
    """The limits of a stage."""

    rounds: int
    seconds: float


def measure(benchmark: str, args: argparse.Namespace, size: str) -> dict[str, Any]:
    """Run the stages on the models, print the tables, and return the content of the JSON."""
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
    """Return the head, with the results of an earlier run of the same day, machine and versions."""
    file = folder / f"{head['benchmark']}-{device.type}-{head['date']}.json"
    if not file.exists():
        return head
    found = json.loads(file.read_text(encoding="utf-8"))
    same = all(found.get(name) == value for name, value in head.items() if name != "models")
    return found if same else head


def _stage(stage: str, model: str, size: str, limits: Limits, caches: Path) -> dict[str, Any]:
    """Return what the stage's process wrote: "made", and the card's state before and after."""
    if stage != "compile":
        return _child(stage, model, size, limits, caches / "shared")
    if size == "cut" and "deep" in MODELS[model].sizes:
        size = "deep"  # the time to compile a whole model depends on its number of blocks
    budget, made, card = Budget(limits.seconds), dict[str, Any](), None
    for number, name in enumerate(CONTESTANTS):
        made[name] = {}
        for state in ("cold", "warm"):  # first with an empty cache, then with the first process's cache
            left = Limits(1, limits.seconds - budget.spent)
            if left.seconds <= 0:
                made[name][state] = {"error": "left out: the stage's time was over"}
                continue
            found = _child(FIRST, model, size, left, caches / f"{model}-{number}", "--contestant", name)
            made[name][state], card = found["made"], found.get("card")
    return {"made": made, "card": card}


def _child(stage: str, model: str, size: str, limits: Limits, cache: Path, *more: str) -> dict[str, Any]:
    """Return a child process's results, or its failure with the results so far."""
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
    """Run a process; return exit code and standard error. After its time limit, it is ended with its descendants."""
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
    """Kill a process, on POSIX with the compiler's processes."""
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _reason(stderr: str) -> str:
    """Return the last line that names an error; lines that libraries print after it are skipped."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no message"]
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Unavailable)\b", line)), lines[-1]
    )


def _text(text: str, folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return name
