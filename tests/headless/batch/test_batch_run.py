"""A batch with workers that do what a test tells them: who gets what, what is tried again, what is parked."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch import batch_run as module
from comfyui_onediff_guard.headless.batch import job_queue
from comfyui_onediff_guard.headless.batch.batch_run import BatchRun
from comfyui_onediff_guard.headless.batch.execution import (
    CannotWrite,
    Done,
    Failed,
    Outcome,
    Refused,
    WorkerDied,
    WorkerUnavailable,
)
from comfyui_onediff_guard.headless.batch.job_queue import JobQueue
from comfyui_onediff_guard.headless.batch.jobs import Job
from comfyui_onediff_guard.headless.batch.outputs import Outputs, Parked
from comfyui_onediff_guard.headless.batch.pipeline_cache import CacheKey
from comfyui_onediff_guard.headless.batch.stats import BatchStats
from comfyui_onediff_guard.headless.batch.worker_pool import Ready
from comfyui_onediff_guard.headless.errors import HostError, OutputError
from comfyui_onediff_guard.headless.workflow.graph import Graph

Does = Callable[[Job, "Scripted"], Outcome]


def job(number: int, kind: str = "a") -> Job:
    return Job(f"job {number}", Graph({}), f"{number:032x}", CacheKey(kind, "", ""))


def does(job: Job, worker: Scripted) -> Outcome:
    folder = worker.pool.outputs.folder / job.content
    folder.mkdir(exist_ok=True)
    (folder / "job.json").touch()
    return Done(1.0)


def ended(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
    return future


@dataclass
class Scripted:
    pool: ScriptedPool
    name: str
    connected: int = 0

    def connect(self) -> Future[Any]:
        self.connected += 1
        answer = self.pool.connects(self)
        return Future() if answer is None else ended(answer)

    def run(self, job: Job) -> Future[Any]:
        self.pool.begun.append(job)
        try:
            return ended(self.pool.does(job, self))
        except RuntimeError as error:
            return ended(error)


@dataclass
class ScriptedPool:
    outputs: Outputs
    does: Does
    connects: Callable[[Scripted], Any] = lambda worker: Ready(worker.name)
    workers: list[Scripted] = field(default_factory=list)
    waves: list[int] = field(default_factory=list)  # how many workers come, at one look after the other
    begun: list[Job] = field(default_factory=list)
    hint = ""

    def new_workers(self) -> list[Scripted]:
        number = self.waves.pop(0) if self.waves else 0
        new = [Scripted(self, f"worker {len(self.workers) + each}") for each in range(number)]
        self.workers += new
        return new


RunOf = Callable[..., tuple[BatchStats, ScriptedPool]]


@pytest.fixture
def run(tmp_path: Path) -> RunOf:
    def go(
        jobs: Any, does: Does = does, workers: int = 2, retry: bool = False, attempts: int = 3, **of_pool: Any
    ) -> Any:
        outputs, stats = Outputs(tmp_path), BatchStats(0, io.StringIO())
        pool = ScriptedPool(outputs, does, **{"waves": [workers], **of_pool})
        BatchRun(JobQueue(iter(jobs), outputs, stats, retry=retry), pool, outputs, stats, attempts).run()
        return stats, pool

    return go


def test_every_job_is_done_once_and_those_that_are_done_are_not(run: RunOf) -> None:
    stats, pool = run([*map(job, range(20)), job(1)])
    assert sorted(each.content for each in pool.begun) == [job(number).content for number in range(20)]
    assert stats.done == 20 and stats.there == 1
    stats, pool = run(map(job, range(25)))
    assert len(pool.begun) == 5 and stats.there == 20


def test_jobs_are_sorted_by_cache_key_and_read_in_chunks(run: RunOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "CHUNK", 8)
    read, ahead = [0], list[int]()

    def jobs() -> Iterator[Job]:
        for number in range(40):
            read[0] += 1
            yield job(number, "abcd"[number % 4])

    def measured(each: Job, worker: Scripted) -> Outcome:
        ahead.append(read[0] - len(worker.pool.begun))
        return does(each, worker)

    stats, pool = run(jobs(), measured, workers=1)
    assert stats.done == 40 and max(ahead) < 8
    assert "".join(each.cache_key.model for each in pool.begun) == "aabbccdd" * 5


@pytest.mark.parametrize("raised", [False, True])
def test_a_job_that_ends_its_worker_is_tried_so_often_and_parked(run: RunOf, tmp_path: Path, raised: bool) -> None:
    def lethal(each: Job, worker: Scripted) -> Outcome:
        if each.name != "job 3":
            return does(each, worker)
        if raised:
            raise RuntimeError("\n segfault\n")
        return WorkerDied("segfault")

    stats, pool = run(map(job, range(6)), lethal)
    assert stats.done == 5 and stats.failed == 1 and stats.lost == 3
    assert [each.attempts for each in pool.begun if each.name == "job 3"] == [0, 1, 2]
    assert sum(worker.connected for worker in pool.workers) == 2 + 3
    parked = Outputs(tmp_path).parked(job(3).content)
    assert parked and parked.attempts == 3 and "3 times, at last so: segfault" in parked.error
    stats, pool = run(map(job, range(6)))
    assert not pool.begun and stats.parked == 1 and stats.faults[0]["name"] == "job 3"
    stats, pool = run(map(job, range(6)), retry=True)
    assert stats.done == 1 and Outputs(tmp_path).parked(job(3).content) is None


def test_a_job_at_fault_is_parked_at_once(run: RunOf) -> None:
    stats, pool = run(
        map(job, range(3)), lambda each, worker: Failed("no") if each.name == "job 0" else does(each, worker)
    )
    assert stats.failed == 1 and stats.done == 2 and len(pool.begun) == 3
    assert sum(worker.connected for worker in pool.workers) == 2


def test_what_one_worker_refuses_goes_to_the_others(run: RunOf) -> None:
    def lacks(each: Job, worker: Scripted) -> Outcome:
        if worker.name == "worker 0" and each.cache_key.model == "a":
            return Refused("no such node")
        return does(each, worker)

    stats, pool = run([job(number, "ab"[number % 2]) for number in range(20)], lacks)
    assert stats.done == 20 and not stats.failed
    stats, _ = run([job(number) for number in range(30, 50)], lambda *_: Refused("no such model"), workers=3)
    assert stats.failed == 20 and stats.faults[0]["error"] == "no such model"
    stats, pool = run([job(99)], lambda *_: Refused("no such model"), workers=20)
    assert stats.failed == 1 and len(pool.begun) == module.MAX_REFUSALS, "of many not all are asked"


@pytest.mark.parametrize("other", ["is given up", "never comes"])
def test_what_waits_for_one_that_does_not_come_is_parked(
    run: RunOf, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)

    def connects(worker: Scripted) -> Any:
        if worker.name == "worker 0":
            return Ready(worker.name)
        return Ready(worker.name, "it did not answer") if other == "is given up" else None

    stats, _ = run([job(0)], lambda *_: Refused("no such model"), connects=connects)
    assert stats.failed == 1 and stats.faults[0]["error"] == "no such model"


def test_workers_that_come_later_get_work(run: RunOf) -> None:
    stats, pool = run(map(job, range(60)), waves=[1, 0, 2])
    assert stats.done == 60 and len(pool.workers) == 3 and all(worker.connected for worker in pool.workers)


def test_a_worker_that_is_away_costs_the_job_no_attempt(run: RunOf) -> None:
    away = iter([WorkerUnavailable("no answer")] * 5)
    stats, pool = run([job(1)], lambda each, worker: next(away, None) or does(each, worker), attempts=1)
    assert stats.done == 1 and stats.lost == 0 and {each.attempts for each in pool.begun} == {0}


def test_outputs_that_cannot_be_written_end_it(run: RunOf) -> None:
    with pytest.raises(OutputError, match="disk is full"):
        run([job(1)], lambda *_: CannotWrite("the disk is full"))


@pytest.mark.parametrize("answer", [Ready("w", "no such folder"), RuntimeError("no such folder")])
def test_without_any_worker_left_it_ends(run: RunOf, answer: Any) -> None:
    with pytest.raises(HostError, match=r"No worker is left.*no such folder"):
        run([job(1)], connects=lambda _: answer)


def test_lines_say_how_far_it_is() -> None:
    stream, clock = io.StringIO(), iter(range(100))
    stats = BatchStats(4, stream, lambda: float(next(clock)))
    stats.finished(job(1), "gpu 0", Done(1.5))
    stats.skipped(job(2), "")
    stats.failed_job(job(3), "line one\nline two")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("[1/4] done job 1 → ") and "1.5 s on gpu 0 · 1/s, 3 s left" in first
    assert second.startswith("[3/4] FAILED job 3 (") and "line one line two · 1/s, 1 s left, 1 failed" in second
    assert stats.summary() == "4 jobs: 1 done in 3.0 s, 1 were there, 1 failed"
    assert Parked(content=job(3).content, name="x", error="e", attempts=1).content == stats.faults[0]["content"]


def test_two_batches_into_one_folder_compute_each_job_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for each other while there are others to do. What one parks, the other does not try."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    begun: list[str] = []
    found: list[BatchStats] = []
    both = threading.Barrier(2, timeout=60)

    def batch() -> None:
        outputs, stats, first = Outputs(tmp_path), BatchStats(20, io.StringIO()), [True]

        def once(each: Job, worker: Scripted) -> Outcome:
            begun.append(each.content)
            if first.pop() if first else False:
                both.wait()
            return Failed("broken") if each.name == "job 7" else does(each, worker)

        found.append(stats)
        pool = ScriptedPool(outputs, once, waves=[1])
        BatchRun(JobQueue(iter(map(job, range(20))), outputs, stats), pool, outputs, stats).run()

    threads = [threading.Thread(target=batch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [job(number).content for number in range(20)]
    assert sum(each.done for each in found) == 19 and sum(each.failed for each in found) == 1
    assert [each.over for each in found] == [20, 20]
    assert not [*(tmp_path / ".running").glob("*.claim")]


HALF = json.loads('"a cut-off emoji: \\ud83d"')


@pytest.mark.parametrize("outcome", [Failed(HALF), Refused(HALF), WorkerDied(HALF), WorkerUnavailable(HALF)])
def test_an_error_with_half_a_character_ends_nothing(run: RunOf, tmp_path: Path, outcome: Outcome) -> None:
    is_away = isinstance(outcome, WorkerUnavailable)

    def fails(each: Job, worker: Scripted) -> Outcome:
        second = is_away and len(worker.pool.begun) > 1
        return does(each, worker) if each.name == "job 2" or second else outcome

    stats, _ = run([replace(job(1), name=HALF), job(2)], fails, workers=1, attempts=1)
    assert stats.over == 2 and stats.done == (2 if is_away else 1)
    parked = Outputs(tmp_path).parked(job(1).content)
    assert (parked is None) is is_away and json.dumps(stats.facts()).encode() and stats.summary()
