"""A batch over up to 1,000 workers, counted: the real course, window, tally and choice of jobs, and workers that take
their time on a clock of their own.

    python benchmarks/fleet.py

Nothing sleeps, and there is no Ray and no folder: what comes of it is where jobs land, how busy workers are, and what
the course itself takes of a processor for each job. A job takes 60 s, and 120 s more where it does not land warm.
"""

from __future__ import annotations

import argparse
import datetime as dt
import heapq
import io
import itertools
import queue
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from comfyui_onediff_guard.headless.batch.affinity import Warmth, landing
from comfyui_onediff_guard.headless.batch.course import Course
from comfyui_onediff_guard.headless.batch.crew import Crew, Event
from comfyui_onediff_guard.headless.batch.jobs import Job
from comfyui_onediff_guard.headless.batch.outputs import Outputs, Parked
from comfyui_onediff_guard.headless.batch.tally import Tally
from comfyui_onediff_guard.headless.batch.window import Window
from comfyui_onediff_guard.headless.batch.work import Done
from comfyui_onediff_guard.headless.workflow.graph import Graph
from measure import RESULTS, machine, write_json

SECONDS, COLD = 60.0, 120.0
SIZES = 2  # of each model, which is what a worker holds one of
FLEETS = (1, 4, 16, 64, 256, 1000)
KINDS = {"one": 1, "six": 6, "fifty": 50}
EACH = 40  # jobs a worker, or 200


class NoFolder:
    """Outputs that are not there yet."""

    def has(self, _content: str) -> bool:
        return False

    def parked(self, _content: str) -> Parked | None:
        return None

    def unpark(self, _content: str) -> None: ...


@dataclass
class Fleet:
    """Workers whose jobs end in the order of a clock that nobody waits for."""

    workers: list[Simulated] = field(default_factory=list)
    now: float = 0.0
    _ends: list[tuple[float, int, Event]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)  # of events that end at the same time, in order

    @property
    def events(self) -> Any:
        return self

    def get(self, timeout: float) -> Event:
        if not self._ends:
            self.now += timeout
            raise queue.Empty
        self.now, _, event = heapq.heappop(self._ends)
        return event

    def put(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._ends, (self.now + seconds, next(self._numbers), event))

    def grow(self) -> None: ...


@dataclass
class Simulated:
    """A worker that holds one model."""

    fleet: Fleet
    name: str
    ready: bool = True
    warm: Any = ()
    _held: frozenset[Warmth] = frozenset()

    def start(self, job: Job) -> None:
        found = landing(job.warmth, self._held)
        seconds = SECONDS + (0.0 if job.warmth in self._held else COLD)
        self._held = frozenset({each for each in self._held if each.loaded == job.warmth.loaded} | {job.warmth})
        self.fleet.put(seconds, Event(self, job, Done(seconds, landing=found, warm=tuple(self._held))))

    def renew(self) -> None:
        self.fleet.put(0.0, Event(self))

    def end(self) -> None: ...


def jobs_of(count: int, kinds: int) -> Iterator[Job]:
    drawn = random.Random(kinds)
    graph = Graph({})
    for number in range(count):
        kind = drawn.randrange(kinds)
        yield Job(f"job {number}", graph, f"{number:032x}", Warmth(str(kind // SIZES), "", str(kind % SIZES)))


def run(workers: int, kinds: int) -> dict[str, Any]:
    count = max(EACH * workers, 200)
    fleet = Fleet()
    fleet.workers = [Simulated(fleet, f"worker {number}") for number in range(workers)]
    outputs = cast("Outputs", NoFolder())
    tally = Tally(count, io.StringIO(), lambda: fleet.now)
    window = Window(jobs_of(count, kinds), outputs, tally)
    for worker in fleet.workers:
        worker.renew()
    course = Course(window, cast("Crew", fleet), outputs, tally, now=lambda: fleet.now)
    began = time.process_time()
    course.run()
    used = time.process_time() - began
    assert tally.done == count
    landed = {each.value: number for each, number in tally.landings.items()}
    return {
        "jobs": count,
        "landed": landed,
        "warm_share": round(landed.get("warm", 0) / count, 4),
        "busy": round(count * SECONDS / (workers * fleet.now), 4),  # of the workers' time, in jobs, the end included
        "course_cpu_ms_a_job": round(1000 * used / count, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    result = {
        "benchmark": "fleet",
        "date": dt.date.today().isoformat(),
        "machine": machine(torch.device("cpu")),
        "job_seconds": SECONDS,
        "cold_seconds": COLD,
        "runs": rows,
    }
    for workers in FLEETS:
        for name, kinds in KINDS.items():
            rows[f"{name} {workers}"] = row = run(workers, kinds)
            print(f"{kinds:3} kinds, {workers:5,} workers: {row}", flush=True)
            write_json(result, args.out, "cpu")


if __name__ == "__main__":
    main()
