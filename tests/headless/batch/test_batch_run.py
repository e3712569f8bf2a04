"""A batch with scripted workers: which worker gets which job, what is retried, and what is parked."""

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
from comfyui_onediff_guard.headless.batch.batch_run import BatchRun, BatchStats, JobQueue
from comfyui_onediff_guard.headless.batch.content import CacheKey
from comfyui_onediff_guard.headless.batch.jobs import Job
from comfyui_onediff_guard.headless.batch.outputs import Outputs
from comfyui_onediff_guard.headless.batch.worker_pool import End, JobOutcome, Ready
from comfyui_onediff_guard.headless.errors import HostError, OutputError
from comfyui_onediff_guard.headless.workflow.graph import Graph

RunJob = Callable[[Job, "ScriptedWorker"], JobOutcome]


def job(number: int, kind: str = "a") -> Job:
    return Job(f"job {number}", Graph({}), f"{number:032x}", CacheKey(kind, "", ""))


def succeed(job: Job, worker: ScriptedWorker) -> JobOutcome:
    folder = worker.pool.outputs.folder / job.content
    folder.mkdir(exist_ok=True)
    (folder / "job.json").touch()
    return JobOutcome(End.DONE)


def finished_future(answer: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(answer())
    except RuntimeError as error:
        future.set_exception(error)
    return future


@dataclass
class ScriptedWorker:
    pool: ScriptedPool
    name: str
    connected: int = 0

    def connect(self) -> Future[Any]:
        self.connected += 1
        return self.pool.connect(self)

    def run(self, job: Job) -> Future[Any]:
        self.pool.started.append(job)
        return finished_future(lambda: self.pool.run_job(job, self))


@dataclass
class ScriptedPool:
    outputs: Outputs
    run_job: RunJob
    connect: Callable[[ScriptedWorker], Future[Any]] = lambda worker: finished_future(lambda: Ready(worker.name))
    workers: list[ScriptedWorker] = field(default_factory=list)
    waves: list[int] = field(default_factory=list)  # how many workers join, poll by poll
    started: list[Job] = field(default_factory=list)

    def new_workers(self) -> list[ScriptedWorker]:
        number = self.waves.pop(0) if self.waves else 0
        new = [ScriptedWorker(self, f"worker {len(self.workers) + each}") for each in range(number)]
        self.workers += new
        return new


RunOf = Callable[..., tuple[BatchStats, ScriptedPool]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunOf:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)

    def run_batch(
        jobs: Any, run_job: RunJob = succeed, workers: int = 2, retry: bool = False, attempts: int = 3, **options: Any
    ) -> Any:
        outputs, stats = Outputs(tmp_path), BatchStats(0, io.StringIO())
        outputs.ensure()
        pool = ScriptedPool(outputs, run_job, **{"waves": [workers], **options})
        BatchRun(JobQueue(jobs, outputs, stats, retry=retry), pool, outputs, stats, attempts).run()
        return stats, pool

    return run_batch


def test_each_job_runs_once_and_done_jobs_are_skipped(run: RunOf) -> None:
    stats, pool = run([*map(job, range(20)), job(1)])
    assert sorted(each.content for each in pool.started) == [job(number).content for number in range(20)]
    assert stats.done == 20 and stats.already_done == 1
    stats, pool = run(map(job, range(25)))
    assert len(pool.started) == 5 and stats.already_done == 20


def test_jobs_are_sorted_by_cache_key_and_read_in_chunks(run: RunOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 8)
    read, ahead = [0], list[int]()

    def jobs() -> Iterator[Job]:
        for number in range(40):
            read[0] += 1
            yield job(number, "abcd"[number % 4])

    def measured(each: Job, worker: ScriptedWorker) -> JobOutcome:
        ahead.append(read[0] - len(worker.pool.started))
        return succeed(each, worker)

    stats, pool = run(jobs(), measured, workers=1)
    assert stats.done == 40 and max(ahead) < 8
    assert "".join(each.cache_key.model for each in pool.started) == "aabbccdd" * 5


LONE_SURROGATE = json.loads('"a cut-off emoji: \\ud83d"')


@pytest.mark.parametrize(
    ("outcome", "attempts", "reconnected", "error"),
    [
        (JobOutcome(End.FAILED, "no"), 1, 0, "no"),
        (JobOutcome(End.FAILED, LONE_SURROGATE), 1, 0, "a cut-off emoji: "),
        (JobOutcome(End.REFUSED, "no such model"), 2, 0, "no such model"),  # by each worker
        (JobOutcome(End.DIED, "segfault"), 3, 3, "Its worker died 3 times, the last time with: segfault"),
        (RuntimeError("\n lost\n"), 3, 3, f"Its worker died 3 times, the last time with: {module.ENDED} (lost)"),
    ],
)
def test_failing_job_is_parked_and_other_jobs_complete(
    run: RunOf, tmp_path: Path, outcome: JobOutcome | Exception, attempts: int, reconnected: int, error: str
) -> None:
    def fails(each: Job, worker: ScriptedWorker) -> JobOutcome:
        if each.content != job(3).content:
            return succeed(each, worker)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    jobs = [*map(job, range(3)), replace(job(3), name=LONE_SURROGATE), job(4)]
    stats, pool = run(jobs, fails)
    assert (stats.done, stats.failed, stats.over, stats.workers_lost) == (4, 1, 5, reconnected)
    assert sum(each.content == job(3).content for each in pool.started) == attempts
    assert sum(worker.connected for worker in pool.workers) == 2 + reconnected
    assert Outputs(tmp_path).parked(job(3).content).startswith(error)
    assert json.dumps(stats.facts()).encode() and stats.summary()
    stats, pool = run(jobs)
    assert not pool.started and stats.parked_before == 1 and len(stats.faults) == 1
    stats, pool = run(jobs, retry=True)
    assert stats.done == 1 and not Outputs(tmp_path).parked(job(3).content)


@pytest.mark.parametrize("retry", [False, True])
def test_duplicates_of_failed_job_are_not_counted_as_done(run: RunOf, retry: bool) -> None:
    stats, pool = run([job(1), job(1), job(2)], lambda *_: JobOutcome(End.FAILED, "no"), retry=retry)
    assert len(pool.started) == 2 and (stats.failed, stats.parked_before, stats.already_done) == (2, 1, 0)


def test_job_refused_by_one_worker_runs_on_another(run: RunOf) -> None:
    def lacks(each: Job, worker: ScriptedWorker) -> JobOutcome:
        lacking = worker.name == "worker 0" and each.cache_key.model == "a"
        return JobOutcome(End.REFUSED, "no such node") if lacking else succeed(each, worker)

    stats, _ = run([job(number, "ab"[number % 2]) for number in range(20)], lacks)
    assert stats.done == 20 and not stats.failed


@pytest.mark.parametrize("other", [finished_future(lambda: Ready("worker 1", "it did not answer")), Future[Any]()])
def test_refused_job_is_parked_if_other_worker_never_connects(run: RunOf, other: Future[Any]) -> None:
    def connect(worker: ScriptedWorker) -> Future[Any]:
        return other if worker.name == "worker 1" else finished_future(lambda: Ready(worker.name))

    stats, _ = run([job(0)], lambda *_: JobOutcome(End.REFUSED, "no such model"), connect=connect)
    assert stats.failed == 1 and stats.faults[0]["error"] == "no such model"


def test_workers_that_join_later_get_jobs(run: RunOf) -> None:
    stats, pool = run(map(job, range(60)), waves=[1, 0, 2])
    assert stats.done == 60 and len(pool.workers) == 3 and all(worker.connected for worker in pool.workers)


@pytest.mark.parametrize("reason", ["no answer", LONE_SURROGATE])
def test_unavailable_worker_costs_job_no_attempt(run: RunOf, reason: str) -> None:
    away = iter([JobOutcome(End.AWAY, reason)] * 5)
    stats, pool = run([job(1)], lambda each, worker: next(away, None) or succeed(each, worker), attempts=1)
    assert stats.done == 1 and stats.workers_lost == 0 and {each.attempts for each in pool.started} == {0}


def test_unwritable_output_ends_batch(run: RunOf) -> None:
    with pytest.raises(OutputError, match="disk is full"):
        run([job(1)], lambda *_: JobOutcome(End.UNWRITABLE, "the disk is full"))


@pytest.mark.parametrize("raises", [False, True])
def test_batch_ends_when_no_worker_is_left(run: RunOf, raises: bool) -> None:
    def answer() -> Ready:
        if raises:
            raise RuntimeError("no such folder")
        return Ready("w", "no such folder")

    with pytest.raises(HostError, match=r"No worker is left.*no such folder"):
        run([job(1)], connect=lambda _: finished_future(answer))


def test_progress_lines_show_count_rate_and_time_left() -> None:
    stream, clock = io.StringIO(), [0.0]
    stats = BatchStats(4, stream, lambda: clock[0])
    clock[0] = 1.0
    stats.finished(job(1), "gpu 0", 1.5)
    stats.skipped(job(2))
    clock[0] = 2.0
    stats.failed_job(job(3), "line one\nline two")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("[1/4] done job 1 → ") and first.endswith(", 1.5 s on gpu 0 · 1/s · 3 s left")
    assert second.startswith("[3/4] FAILED job 3 (") and second.endswith(
        "line one line two · 1/s · 1 s left · 1 failed"
    )
    assert stats.summary() == "4 jobs, 1 done, 1 already done, 1 failed in 2.0 s"


def test_two_batches_in_one_folder_run_each_job_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither waits for the other while jobs are left, and neither tries a job that the other parked."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    begun: list[str] = []
    found: list[BatchStats] = []
    both = threading.Barrier(2, timeout=60)

    def batch() -> None:
        outputs, stats, first = Outputs(tmp_path), BatchStats(20, io.StringIO()), [True]
        outputs.ensure()

        def once(each: Job, worker: ScriptedWorker) -> JobOutcome:
            begun.append(each.content)
            if first.pop() if first else False:
                both.wait()
            return JobOutcome(End.FAILED, "broken") if each.name == "job 7" else succeed(each, worker)

        found.append(stats)
        pool = ScriptedPool(outputs, once, waves=[1])
        BatchRun(JobQueue(map(job, range(20)), outputs, stats), pool, outputs, stats).run()

    threads = [threading.Thread(target=batch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [job(number).content for number in range(20)]
    assert sum(each.done for each in found) == 19 and sum(each.failed for each in found) == 1
    assert [each.over for each in found] == [20, 20]
    assert not [*(tmp_path / ".running").glob("*.claim")]
