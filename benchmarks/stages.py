"""What gpu.py and compiled.py do to one model, each stage in a process of its own: harness.py starts it.

    python benchmarks/stages.py STAGE MODEL --size full --rounds 20 --result FILE

A contestant that fails is a row that says how, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attention import attention
from contestants import AGAIN, EAGER, GROUPS, OURS, WHOLE, Contestant, Ours, Subject, entrants
from denoisers import MODELS
from floor import tflop, tflops
from kernel_times import profile
from measure import Step, attempt, interleave, peak_bytes, quartiles, synchronize

WARM_UP = 3  # steps: one that compiles or learns, one that compiles what was learned, one to be sure
FIRST = "first"  # of compile.cold and compile.warm
STEADY = 3  # steps behind the first, of which the median is subtracted from it
DTYPES = {"steps": "bf16", "rerun": "bf16", FIRST: "bf16", "profile": "bf16", "fp16": "fp16"}
CONTESTANTS = (WHOLE, OURS)  # whose first step is timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*GROUPS, FIRST, "attention", "profile"])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--size", default="full")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--contestant", choices=CONTESTANTS, default=OURS, help="of the stage 'first'")
    parser.add_argument("--result", type=Path, required=True, help="JSON; text, for the stage 'profile'")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = MODELS[args.model]
    subject = Subject(args.model, model, model.sizes[args.size], device, DTYPES.get(args.stage, "bf16"))
    with torch.inference_mode():
        made = run(args.stage, subject, args.rounds, args.contestant)
    text = made if isinstance(made, str) else json.dumps(made)
    args.result.write_text(text, encoding="utf-8")


def run(stage: str, subject: Subject, rounds: int, contestant: str = OURS) -> Any:
    """What the stage found, as JSON or text has it."""
    if stage == "attention":
        return attention(subject, rounds)
    if stage == "profile":
        return profile({name: GROUPS["steps"][name](subject) for name in (EAGER, *CONTESTANTS)}, subject.device)
    if stage == FIRST:
        return first(GROUPS["steps"][contestant], subject)
    return side_by_side(stage, subject, rounds)


def first(make: Contestant, subject: Subject) -> dict[str, Any]:
    """Seconds that the first step of this process takes beyond a later one, and the graphs that it made."""
    _ = subject.module, subject.call, subject.given  # made before the clock starts
    started = time.perf_counter()
    step = make(subject)
    step()
    synchronize(subject.device)
    seconds = time.perf_counter() - started
    graphs = importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"]
    steady = statistics.median(_seconds(step, subject.device) for _ in range(STEADY))
    return {"seconds": round(seconds - steady, 3), "steady": round(steady, 4), "graphs": graphs}


def side_by_side(group: str, subject: Subject, rounds: int) -> dict[str, Any]:
    """Rows of the group's contestants, timed paired and interleaved."""
    reference = EAGER if EAGER in GROUPS[group] else OURS
    rows: dict[str, dict[str, Any]] = {name: {} for name in entrants(group, subject)}
    steps, outputs = {}, {}
    for name, make in entrants(group, subject).items():
        found = attempt(lambda make=make: warm(make, subject))
        if isinstance(found, str):
            rows[name] = {"error": found}
            continue
        steps[name], outputs[name], rows[name]["peak_bytes"] = found
    seconds = interleave(steps, rounds, subject.device)
    operations = tflop(subject.model, subject.size)
    reached = tflops(subject.device, subject.dtype)
    for name, step in steps.items():
        rows[name] |= step.facts() if isinstance(step, Ours) else {}
        rows[name] |= figures(seconds, name, reference) | _whole(seconds, name)
        rows[name]["share_of_floor"] = round(operations / reached["used"] / rows[name]["seconds"], 3)
        rows[name]["difference"] = _difference(outputs[name], outputs.get(reference))
    parameters = sum(parameter.numel() for parameter in subject.module.parameters())
    return {
        "dtype": subject.dtype,
        "size": str(subject.size),
        "parameters": parameters,
        "weight_bytes": 2 * parameters,
        "tflop": round(operations, 5),
        "tflops": reached,
        "rounds": rounds,
        "reference": reference,
        "rows": rows,
    }


def warm(make: Contestant, subject: Subject) -> tuple[Step, torch.Tensor, int]:
    """A contestant that has compiled and learned; what it puts out, and its peak in bytes beyond the weights."""
    step = make(subject)
    for _ in range(WARM_UP - 1):
        step()
    return step, step()[0].float().cpu(), peak_bytes(step, subject.device)


def figures(seconds: dict[str, list[float]], name: str, reference: str) -> dict[str, Any]:
    """Of one contestant; how many times as fast as the reference, which may be missing."""
    made: dict[str, Any] = {"seconds": round(statistics.median(seconds[name]), 5)}
    if reference in seconds:
        made |= {"speed": _speed(seconds, name, reference), "middle_half": quartiles(seconds, reference, name)}
    return made


def _whole(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    return {"speed_over_whole": _speed(seconds, name, WHOLE)} if WHOLE in seconds and name != AGAIN else {}


def _speed(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    return round(statistics.median(b / a for a, b in zip(seconds[name], seconds[reference], strict=True)), 4)


def _difference(output: torch.Tensor, expected: torch.Tensor | None) -> float | None:
    """In parts of the expected output's norm."""
    return None if expected is None else round(((output - expected).norm() / expected.norm()).item(), 5)


def _seconds(step: Step, device: torch.device) -> float:
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
