"""Many jobs over several workers: what survives kills, what lands warm, and what the command itself takes.

    python benchmarks/batch.py                     all of it, about a quarter of an hour on two cores
    python benchmarks/batch.py --parts driver      one of faults, warm, warm4, driver, memory

faults   200 toy jobs of 2 s over 4 workers; one killed after every 8 finished jobs, the command once.
warm     200 runs of small CogVideoX models by the shipped workflow, compiled, of 6 kinds in drawn order, 2 workers.
warm4    the same over 4 workers.
driver   toy jobs of 1 s over 1, 2 and 4 workers: jobs a second against the model of docs/scale.md, the command's CPU.
memory   10,000 toy jobs of no time over 2 workers: the command's memory while they wait.

A toy job sleeps; everything else about it is the real thing (toy_jobs.py).
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import toy_jobs
from batch_runs import HANG_SECONDS, REAL, Batch, Found, surroundings
from measure import RESULTS, machine, write_json

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = "cogvideox_text_to_video_webp.json"


@contextmanager
def folder() -> Iterator[tuple[Path, dict[str, str]]]:
    with tempfile.TemporaryDirectory() as name, surroundings() as environment:
        (Path(name) / "models").mkdir()
        yield Path(name), environment


def faults(jobs: int = 200, seconds: float = 2.0, workers: int = 4) -> dict[str, Any]:
    with folder() as (here, environment):
        log = here / "log"
        busy = toy_jobs.workflow(seconds=seconds / 2, pause=seconds / 6, log=str(log))
        lines = [{"workflow": busy, "matrix": {"seeds": {"count": jobs}}}]
        file = toy_jobs.write_jobs(here / "jobs.jsonl", lines)
        run = Batch(file, here / "out", ("--workers", str(workers), "--attempts", "9"), environment, log=log)
        began = time.monotonic()
        commands = run.hurt(every=8, driver_at=jobs // 2, jobs=jobs)
        answer, found = run.finish(), Found.in_(run)
        return {
            "jobs": jobs,
            "workers": workers,
            "seconds": round(time.monotonic() - began, 1),
            "commands": commands,
            "workers_killed": len(run.killed),
            "whole_once": len(set(found.seeds)),
            "whole_twice": len(found.seeds) - len(set(found.seeds)),
            "half_written": len(found.broken),
            "begun": found.begun,
            "begun_though_whole": found.redone,
            "exit_code": answer["code"],
        }


def warm(jobs: int = 200, workers: int = 2) -> dict[str, Any]:
    """Three models, of which a worker holds one, at two sizes; seeds all differ."""
    from comfyui_onediff_guard.demo.small_model import build_cogvideox

    with folder() as (here, environment):
        names = [f"CogVideoX-2b-{number}" for number in range(3)]
        for number, name in enumerate(names):
            build_cogvideox(here / "models" / "diffusers" / name, seed=number, heads=3 + number)
        kinds = [(model, size) for model in names for size in ((64, 48), (96, 64))]
        drawn = random.Random(0)
        stream = [kinds[number % len(kinds)] for number in range(jobs)]
        drawn.shuffle(stream)
        lines = [
            {"workflow": WORKFLOW, "set": [*_sets(*kind), f"Sample CogVideoX.seed={number}"], "name": f"job {number}"}
            for number, kind in enumerate(stream)
        ]
        file = toy_jobs.write_jobs(here / "jobs.jsonl", lines)
        options = ("--workers", str(workers), "--workflows", str(ROOT / "workflows" / "api"))
        kept = {"ONEDIFF_GUARD_COMPILED": str(here / "compiled"), "ONEDIFF_GUARD_PROFILES": str(here / "profiles")}
        run = Batch(file, here / "out", options, {**environment, **kept}, code=REAL)
        run.start()
        answer = run.finish()
        records = [json.loads((path / "job.json").read_text()) for path in run.whole()]
        compiled = collections.Counter(record["worker"] for record in records if record["graphs_compiled"])
        had: dict[str, set[str]] = {}
        for record in records:
            had.setdefault(record["worker"], set()).add(_kind(record["workflow"]))
        return {
            "jobs": jobs,
            "workers": workers,
            "kinds": len(kinds),
            "seconds": answer["seconds"],
            "done": answer["done"],
            "failed": answer["failed"],
            "landed": answer["landed"],
            "warm_share": round(answer["landed"]["warm"] / jobs, 4),
            "jobs_that_compiled_by_worker": dict(compiled),
            "kinds_by_worker": {worker: len(kinds) for worker, kinds in had.items()},
            "compiles_within_kinds": all(compiled[worker] <= len(kinds) for worker, kinds in had.items()),
        }


def _sets(model: str, size: tuple[int, int]) -> list[str]:
    width, height = size
    return [
        f"Load CogVideoX.model={model}",
        "Load CogVideoX.precision=fp32",
        "Load CogVideoX.backend=inductor",
        f"Sample CogVideoX.width={width}",
        f"Sample CogVideoX.height={height}",
        "Sample CogVideoX.frames=9",
        "Sample CogVideoX.steps=2",
        "Encode Prompt.prompt=a small boat on a lake",
    ]


def _kind(workflow: dict[str, Any]) -> str:
    loader, sampler = workflow["1"]["inputs"], workflow["4"]["inputs"]
    return f"{loader['model']} {sampler['width']}"


def driver(seconds: float = 1.0, each: int = 40) -> dict[str, Any]:
    """`each`: jobs a worker."""
    rows = {str(workers): _rate(seconds, each * workers, workers) for workers in (1, 2, 4)}
    alone = rows["1"]
    between = 1 / alone["jobs_a_second"] - seconds  # of a worker, from one job's end to the next one's beginning
    for workers, row in rows.items():
        row["model_jobs_a_second"] = round(int(workers) / (seconds + between), 4)
        row["measured_over_model"] = round(row["jobs_a_second"] / row["model_jobs_a_second"], 4)
    return {"job_seconds": seconds, "between_jobs_seconds": round(between, 4), "by_workers": rows}


def _rate(seconds: float, jobs: int, workers: int) -> dict[str, Any]:
    with folder() as (here, environment):
        lines = [{"workflow": toy_jobs.workflow(seconds=seconds), "matrix": {"seeds": {"count": jobs}}}]
        file = toy_jobs.write_jobs(here / "jobs.jsonl", lines)
        run = Batch(file, here / "out", ("--workers", str(workers)), environment)
        process = psutil.Process(run.start().pid)
        marks = _watched(run, [2 * workers, jobs - workers], lambda: _cpu(process))
        answer = run.finish()
        assert answer["done"] == jobs, answer
        (first, began, used), (last, ended, used_last) = marks
        rate = (last - first) / (ended - began)
        return {
            "jobs": jobs,
            "jobs_a_second": round(rate, 4),
            "busy": round(rate * seconds / workers, 4),  # of the workers' time, in jobs
            "command_cpu_a_job": round((used_last - used) / (last - first), 5),
            "command_share": round((used_last - used) / (last - first) / seconds, 5),
        }


def memory(jobs: int = 10_000, workers: int = 2) -> dict[str, Any]:
    with folder() as (here, environment):
        lines = [{"workflow": toy_jobs.workflow(), "matrix": {"seeds": {"count": jobs}}}]
        file = toy_jobs.write_jobs(here / "jobs.jsonl", lines)
        run = Batch(file, here / "out", ("--workers", str(workers)), environment)
        process = psutil.Process(run.start().pid)
        places = [jobs * part // 20 for part in range(1, 20)]
        marks = _watched(run, places, lambda: process.memory_info().rss)
        answer = run.finish()
        assert answer["done"] == jobs, answer
        resident = [value / 2**20 for _, _, value in marks]
        middle = statistics.median(resident)
        return {
            "jobs": jobs,
            "seconds": answer["seconds"],
            "resident_mib": {str(done): round(value / 2**20, 1) for done, _, value in marks},
            "largest_deviation_from_median": round(max(abs(value / middle - 1) for value in resident), 4),
        }


def _watched(run: Batch, places: list[int], look: Callable[[], float]) -> list[tuple[int, float, float]]:
    """At each count of finished jobs: that count, the time, and what `look` sees."""
    marks, until = [], time.monotonic() + HANG_SECONDS
    assert run.process
    for place in places:
        while (done := _count(run.out)) < place:
            if run.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"only {done} jobs were done: {run.finish()}")
            time.sleep(0.01)
        marks.append((done, time.monotonic(), look()))
    return marks


def _count(out: Path) -> int:
    try:
        return sum(not entry.name.startswith((".", "parked")) for entry in os.scandir(out))
    except FileNotFoundError:
        return 0


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "faults": faults,
    "warm": warm,
    "warm4": partial(warm, workers=4),
    "driver": driver,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    date = dt.date.today().isoformat()
    file = args.out / f"batch-cpu-{date}.json"
    earlier = json.loads(file.read_text())["parts"] if file.exists() else {}
    result: dict[str, Any] = {
        "benchmark": "batch",
        "date": date,
        "machine": machine(torch.device("cpu")),
        "parts": earlier,
    }
    for part in args.parts:
        result["parts"][part] = found = PARTS[part]()
        print(part, json.dumps(found, indent=2))
        write_json(result, args.out, "cpu")
    print(f"written to {file}", file=sys.stderr)


if __name__ == "__main__":
    main()
