"""Run one stage of gpu.py or compiled.py on one model, in the process that harness.py starts for it.

    python scripts/benchmarks/stages.py STAGE MODEL --size full --rounds 20 --seconds 420 --result FILE

If a contestant fails, its row has the error, and the others continue. Results are written as they arrive, so a process
that is ended early loses none.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import card
import torch
from attention import attention
from budget import SECONDS, Budget
from contestants import Contestant, Ours
from denoisers import MODELS
from entrants import AGAIN, BY_BLOCK, DTYPES, EAGER, GROUPS, OURS, WHOLE, entrants
from floor import tflop, tflops
from kernel_times import profile
from measure import Step, attempt, interleave, peak_bytes, quartiles, seconds_of, synchronize
from subject import Subject

WARM_UP = 3  # steps: one compiles or learns, one compiles the learned overrides, one is spare
FIRST = "first"  # the child stage of compile.cold and compile.warm
STEADY = 3  # steps after the first; their median is subtracted from it
CONTESTANTS = (OURS, BY_BLOCK, WHOLE)  # their first step is timed
OTHERS = ("attention", "profile", "end_to_end")
NOT_FINITE = "not finite"
GRAPHS = 64  # per piece of code: every contestant compiles the same blocks
Keep = Callable[[Any], None]  # writes the results so far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*GROUPS, FIRST, *OTHERS])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--size", default="full")
    parser.add_argument("--rounds", type=int, default=20, help="most rounds")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of the stage")
    parser.add_argument("--contestant", choices=CONTESTANTS, default=OURS, help="contestant of the stage 'first'")
    parser.add_argument("--result", type=Path, required=True, help="JSON file for the result")
    args = parser.parse_args()
    budget = Budget(args.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = card.state(device)

    def keep(made: Any) -> None:
        text = json.dumps({"made": made, "card": {"before": before, "after": card.state(device)}})
        whole = args.result.with_suffix(".whole")  # the process may be ended at any time
        whole.write_text(text, encoding="utf-8")
        whole.replace(args.result)

    model, dtype = MODELS[args.model], DTYPES.get(args.stage, "bf16")
    subject = Subject(args.model, model, model.sizes[args.size], device, dtype, hot=args.stage == "stream")
    keep(run(args.stage, subject, args.rounds, budget, keep, args.contestant))


def run(stage: str, subject: Subject, rounds: int, budget: Budget, keep: Keep, contestant: str) -> Any:
    """Return a stage's results, in the form of the JSON."""
    if stage == "end_to_end":
        from end_to_end import end_to_end

        return end_to_end(subject, rounds, budget, keep)
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    with torch.inference_mode(), dynamo.patch(recompile_limit=GRAPHS):
        if stage == "attention":
            return attention(subject, rounds, budget)
        if stage == "profile":
            return profile({name: GROUPS["steps"][name](subject) for name in (EAGER, WHOLE, OURS)}, subject.device)
        if stage == FIRST:
            return first(GROUPS["steps"][contestant], subject)
        return side_by_side(stage, subject, rounds, budget, keep)


def first(make: Contestant, subject: Subject) -> dict[str, Any]:
    """Return the seconds of this process's first step beyond a later step, and its number of graphs."""
    _ = subject.module, subject.call, subject.given  # built before the clock starts
    started = time.perf_counter()
    step = make(subject)
    step()
    synchronize(subject.device)
    seconds = time.perf_counter() - started
    graphs = importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"]
    steady = statistics.median(seconds_of(step, subject.device) for _ in range(STEADY))
    return {"seconds": round(seconds - steady, 3), "steady": round(steady, 4), "graphs": graphs}


def side_by_side(group: str, subject: Subject, most: int, budget: Budget, keep: Keep) -> dict[str, Any]:
    """Return rows of the group's contestants, timed paired and interleaved."""
    reference = EAGER if EAGER in GROUPS[group] else OURS
    made, rows = _head(subject, reference), dict[str, dict[str, Any]]()
    made["rows"] = rows
    steps: dict[str, Step] = {}
    for name, make in entrants(group, subject.model).items():
        found = budget.too_late() or attempt(lambda make=make: warm(make, subject))
        if isinstance(found, str):
            rows[name] = {"error": found}
        else:
            steps[name], rows[name] = found
        keep(made)
    if not steps:
        return made
    made["rounds"] = budget.rounds((rows[name]["seconds"] for name in steps), most)
    seconds = interleave(steps, made["rounds"], subject.device)
    for name, step in steps.items():
        rows[name] |= step.facts() if isinstance(step, Ours) else {}
        rows[name] |= figures(seconds, name, reference) | _over(seconds, name)
        floor = made["tflop"] / made["tflops"]["used"]
        rows[name]["share_of_floor"] = round(floor / rows[name]["seconds"], 3)
    return made


def _head(subject: Subject, reference: str) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in subject.module.parameters())
    exact, operations = subject.exact, tflop(subject.model, subject.size)
    return {
        "dtype": subject.dtype,
        "size": str(subject.size),
        "parameters": parameters,
        "tflop": round(sum(operations.values()), 5),
        "tflop_by_kind": {kind: round(part, 5) for kind, part in operations.items()},
        "tflops": tflops(subject.device, subject.dtype),
        "rounds": 0,
        "reference": reference,  # for speed
        "strict_fp32": {"seconds": round(exact.seconds, 4), "stream_peak": exact.stream_peak},  # for errors
    }


def warm(make: Contestant, subject: Subject) -> tuple[Step, dict[str, Any]]:
    """Return a contestant that has compiled and learned, and its row so far: seconds, error, bytes of weights on the
    device, and the step's peak bytes beyond those allocated before."""
    step = make(subject)
    for _ in range(WARM_UP - 1):
        step()
    synchronize(subject.device)
    started = time.perf_counter()
    output = step()[0].float().cpu()
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 5)}
    row["off_fp32"] = off_by(output, subject.exact.output)
    there = 0 if getattr(step, "in_parts", False) else sum(p.nbytes for p in subject.module.parameters())
    return step, row | {"weight_bytes": there, "peak_bytes": peak_bytes(step, subject.device)}


def off_by(output: torch.Tensor, exact: torch.Tensor) -> Any:
    """Return the error as a share of the exact output's norm; a text if it is not finite."""
    found = ((output.double() - exact).norm() / exact.double().norm()).item()
    return round(found, 6) if math.isfinite(found) else NOT_FINITE


def figures(seconds: dict[str, list[float]], name: str, reference: str) -> dict[str, Any]:
    """Return one contestant's figures, and its speed relative to the reference, if there is one."""
    made: dict[str, Any] = {"seconds": round(statistics.median(seconds[name]), 5)}
    if reference in seconds:
        made |= {"speed": _speed(seconds, name, reference), "middle_half": quartiles(seconds, reference, name)}
    return made


def _over(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    others = {"speed_over_whole": WHOLE, "speed_over_blocks": BY_BLOCK}
    return {key: _speed(seconds, name, other) for key, other in others.items() if other in seconds and name != AGAIN}


def _speed(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    return round(statistics.median(b / a for a, b in zip(seconds[name], seconds[reference], strict=True)), 4)


if __name__ == "__main__":
    main()
