"""The course of a batch with workers that do what a test tells them: who gets what, what is tried again, what is
parked."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch import course as module
from comfyui_onediff_guard.headless.batch import window as windows
from comfyui_onediff_guard.headless.batch.affinity import Landing, Warmth, landing
from comfyui_onediff_guard.headless.batch.course import Costs, Course
from comfyui_onediff_guard.headless.batch.crew import Event
from comfyui_onediff_guard.headless.batch.jobs import Job
from comfyui_onediff_guard.headless.batch.outputs import Outputs, Parked
from comfyui_onediff_guard.headless.batch.tally import Tally
from comfyui_onediff_guard.headless.batch.window import Window
from comfyui_onediff_guard.headless.batch.work import Away, Done, Failed, Lost, Outcome, Refused, Stopped
from comfyui_onediff_guard.headless.errors import HostError, OutputError
from comfyui_onediff_guard.headless.workflow.graph import Graph

Does = Callable[[Job, "Scripted"], Outcome]


def job(number: int, kind: str = "a") -> Job:
    return Job(f"job {number}", Graph({}), f"{number:032x}", Warmth(kind, "", ""))


def does(job: Job, worker: Scripted) -> Outcome:
    worker.crew.outputs.folder.joinpath(job.content).mkdir()
    worker.crew.outputs.folder.joinpath(job.content, "job.json").touch()
    return Done(1.0, landing=landing(job.warmth, worker.held), warm=(job.warmth,))


@dataclass
class Scripted:
    crew: ScriptedCrew
    name: str
    ready: bool = False
    warm: Any = ()
    held: tuple[Warmth, ...] = ()  # in truth
    renewed: int = 0
    ended: int = 0

    def start(self, job: Job) -> None:
        self.crew.begun.append(job)
        outcome = self.crew.does(job, self)
        if isinstance(outcome, Done):
            self.held = outcome.warm
        self.crew.events.put(Event(self, job, outcome))

    def renew(self) -> None:
        self.renewed, self.held, self.ready = self.renewed + 1, (), True
        self.crew.events.put(Event(self))

    def end(self) -> None:
        self.ended += 1


@dataclass
class ScriptedCrew:
    outputs: Outputs
    does: Does = does
    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)
    workers: list[Scripted] = field(default_factory=list)
    begun: list[Job] = field(default_factory=list)

    def grow(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Tally, ScriptedCrew]]:
    def go(jobs: Any, does: Does = does, workers: int = 2, retry: bool = False, **options: Any) -> Any:
        outputs = Outputs(tmp_path)
        crew = ScriptedCrew(outputs, does)
        for number in range(workers):
            crew.workers.append(Scripted(crew, f"worker {number}"))
            crew.workers[-1].renew()
        tally = Tally(options.pop("total", 0), io.StringIO())
        Course(Window(iter(jobs), outputs, tally, retry=retry), crew, outputs, tally, **options).run()
        return tally, crew

    return go


def test_every_job_is_done_once_and_those_that_are_done_are_not(run: Any) -> None:
    tally, crew = run(map(job, range(20)))
    assert sorted(each.content for each in crew.begun) == [job(number).content for number in range(20)]
    assert tally.done == 20 and tally.there == 0
    tally, crew = run(map(job, range(25)))
    assert len(crew.begun) == 5 and tally.there == 20


def test_two_lines_that_are_the_same_job_run_once(run: Any) -> None:
    tally, crew = run([job(1), job(1), job(2), job(1)])
    assert len(crew.begun) == 2 and tally.done == 2 and tally.there == 2


def test_a_job_that_ends_its_worker_is_tried_so_often_and_parked(run: Any, tmp_path: Path) -> None:
    def lethal(each: Job, worker: Scripted) -> Outcome:
        return Lost("segfault") if each.name == "job 3" else does(each, worker)

    tally, crew = run(map(job, range(6)), lethal, attempts=3)
    assert tally.done == 5 and tally.failed == 1 and tally.lost == 3
    tries = [each.attempts for each in crew.begun if each.name == "job 3"]
    assert tries == [0, 1, 2]
    assert sum(worker.renewed for worker in crew.workers) == 2 + 3, "a fresh one each time"
    parked = Outputs(tmp_path).parked(job(3).content)
    assert parked and parked.attempts == 3 and "3 times, at last so: segfault" in parked.error
    tally, crew = run(map(job, range(6)), attempts=3)
    assert not crew.begun and tally.parked == 1 and tally.faults[0]["name"] == "job 3"
    tally, crew = run(map(job, range(6)), retry=True)
    assert tally.done == 1 and Outputs(tmp_path).parked(job(3).content) is None


def test_a_job_at_fault_is_parked_at_once(run: Any) -> None:
    def fails(each: Job, worker: Scripted) -> Outcome:
        return Failed("width is 7", worker.held) if each.name == "job 0" else does(each, worker)

    tally, crew = run(map(job, range(3)), fails)
    assert tally.failed == 1 and tally.done == 2 and len(crew.begun) == 3
    assert sum(worker.renewed for worker in crew.workers) == 2


def test_one_that_lacks_what_jobs_need_does_not_spoil_them(run: Any) -> None:
    """It refuses at once, so that it is free again and again: all that others can do would go to it, and be parked."""

    def lacks(each: Job, worker: Scripted) -> Outcome:
        if worker.name == "worker 0" and each.warmth.model == "a":
            return Refused("no such node", worker.held)
        return does(each, worker)

    tally, crew = run([job(number, "ab"[number % 2]) for number in range(20)], lacks)
    assert tally.done == 20 and not tally.failed and not tally.lost
    again = [each.name for each in crew.begun if each.refusals]
    assert 1 <= len(again) <= 10 and len({*again}) == len(again) and len(crew.begun) == 20 + len(again)
    tally, _ = run([job(number) for number in range(30, 50)], lambda *_: Refused("no such model"), workers=3)
    assert tally.failed == 20 and tally.faults[0]["error"] == "no such model"


def test_of_many_not_all_are_asked(run: Any) -> None:
    tally, crew = run([job(0)], lambda *_: Refused("no such model"), workers=20)
    assert tally.failed == 1 and len(crew.begun) == module.MAX_REFUSALS


def test_what_waits_for_one_that_does_not_come_back_is_parked(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refuses it; the second was away, and is given up."""

    def goes(each: Job, worker: Scripted) -> Outcome:
        return Refused("no such model") if worker.name == "worker 0" else Away("no answer")

    def given_up(self: Scripted) -> None:
        self.renewed += 1
        self.ready = self.renewed == 1
        self.crew.events.put(Event(self, None, None if self.ready else Lost("it did not answer")))

    monkeypatch.setattr(Scripted, "renew", given_up)
    tally, _ = run([job(0)], goes)
    assert tally.failed == 1 and tally.faults[0]["error"] == "no such model"


def test_what_waits_for_one_that_never_comes_is_parked(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker for which a cluster has no room."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    renew = Scripted.renew
    monkeypatch.setattr(Scripted, "renew", lambda self: renew(self) if self.name == "worker 0" else None)
    tally, _ = run([job(0)], lambda *_: Refused("no such model"))
    assert tally.failed == 1 and tally.faults[0]["error"] == "no such model"


def test_workers_that_come_later_get_work(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)

    def grow(self: ScriptedCrew) -> None:
        if len(self.workers) < 3:
            self.workers.append(Scripted(self, f"worker {len(self.workers)}"))
            self.workers[-1].renew()

    monkeypatch.setattr(ScriptedCrew, "grow", grow)
    tally, crew = run([job(number, "abc"[number % 3]) for number in range(60)], workers=1)
    assert tally.done == 60 and all(worker.held for worker in crew.workers) and len(crew.workers) == 3


def test_a_worker_that_is_away_costs_the_job_no_attempt(run: Any) -> None:
    away = iter([Away("no answer")] * 5)

    def sometimes(each: Job, worker: Scripted) -> Outcome:
        return next(away, None) or does(each, worker)

    tally, crew = run([job(1)], sometimes, attempts=1)
    assert tally.done == 1 and tally.lost == 0 and {each.attempts for each in crew.begun} == {0}


def test_outputs_that_cannot_be_written_end_it(run: Any) -> None:
    with pytest.raises(OutputError, match="disk is full"):
        run([job(1)], lambda *_: Stopped("the disk is full"))


def test_without_any_worker_left_it_ends(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def useless(self: Scripted) -> None:
        self.ready = False
        self.crew.events.put(Event(self, None, Lost("no such folder")))

    monkeypatch.setattr(Scripted, "renew", useless)
    with pytest.raises(HostError, match=r"No worker is left.*no such folder"):
        run([job(1)])


def test_it_reads_no_more_than_a_window_ahead(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "SIZE", 8)
    read = 0

    def jobs() -> Iterator[Job]:
        nonlocal read
        for number in range(100):
            read += 1
            yield job(number)

    ahead: list[int] = []

    def measured(each: Job, worker: Scripted) -> Outcome:
        ahead.append(read - len(worker.crew.begun))
        return does(each, worker)

    tally, _ = run(jobs(), measured)
    assert tally.done == 100 and max(ahead) <= 8


def test_a_mixed_stream_lands_warm(run: Any) -> None:
    tally, _ = run([job(number, "abcd"[number % 4]) for number in range(200)], workers=4)
    assert tally.landings[Landing.WARM] >= 190


def test_as_many_workers_start_as_a_long_file_pays_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window has too few jobs to keep all of them busy, and the file has not."""
    monkeypatch.setattr(windows, "SIZE", 8)
    monkeypatch.setattr(windows, "EACH", 1)
    tally, crew = run(map(job, range(400)), workers=6, total=400)
    assert tally.done == 400 and all(worker.held for worker in crew.workers)


def test_one_kind_alone_gets_all_workers_where_that_pays(run: Any) -> None:
    tally, crew = run(map(job, range(40)), workers=4)
    assert tally.done == 40
    assert all(worker.held for worker in crew.workers)


def test_a_job_that_does_not_end_has_its_worker_ended(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    clock = iter(range(0, 10_000, 30))

    def hangs(each: Job, worker: Scripted) -> Any:
        return None

    def end(self: Scripted) -> None:
        self.ended += 1
        self.crew.does = does
        self.crew.events.put(Event(self, self.crew.begun[-1], Lost("it was ended")))

    def start(self: Scripted, each: Job) -> None:
        self.crew.begun.append(each)
        if outcome := self.crew.does(each, self):
            self.crew.events.put(Event(self, each, outcome))

    monkeypatch.setattr(Scripted, "end", end)
    monkeypatch.setattr(Scripted, "start", start)
    tally, crew = run([job(1)], hangs, workers=1, timeout=5.0, now=lambda: float(next(clock)))
    assert tally.done == 1 and tally.lost == 1 and crew.workers[0].ended == 1


def test_what_getting_warm_costs_is_learned() -> None:
    costs = Costs()
    assert costs.patience() == module.PATIENCE
    costs.add(Done(31.0, landing=Landing.COLD))
    costs.add(Done(1.0, landing=Landing.WARM))
    assert costs.patience() == 30
    costs.add(Done(1.0, landing=Landing.LOADED))
    assert costs.patience() == 15


def test_lines_say_how_far_it_is() -> None:
    stream, clock = io.StringIO(), iter(range(100))
    tally = Tally(4, stream, lambda: float(next(clock)))
    tally.finished(job(1), "gpu 0", Done(1.5, landing=Landing.WARM))
    tally.skipped(job(2), "")
    tally.gave_up(job(3), "line one\nline two")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("[1/4] done job 1 → ") and "1.5 s on gpu 0 (warm) · 1/s, 3 s left" in first
    assert second.startswith("[3/4] FAILED job 3 (") and "line one line two · 1/s, 1 s left, 1 failed" in second
    assert tally.summary() == "4 jobs: 1 done in 3.0 s, 1 were there, 1 failed"
    parked = Parked(content=job(3).content, name="x", error="e", attempts=1)
    assert parked.content == tally.faults[0]["content"]


def test_two_batches_into_one_folder_compute_each_job_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for each other while there are others to do. What one parks, the other does not try."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    begun: list[str] = []
    tallies: list[Tally] = []
    both = threading.Barrier(2, timeout=60)

    def batch() -> None:
        outputs, tally, first = Outputs(tmp_path), Tally(20, io.StringIO()), [True]

        def once(each: Job, worker: Scripted) -> Outcome:
            begun.append(each.content)
            if first.pop() if first else False:
                both.wait()
            (tmp_path / each.content).mkdir(exist_ok=True)
            return Failed("broken") if each.name == "job 7" else does_again(each, worker)

        def does_again(each: Job, worker: Scripted) -> Outcome:
            (tmp_path / each.content / "job.json").touch()
            return Done(1.0, warm=(each.warmth,))

        crew = ScriptedCrew(outputs, once)
        crew.workers.append(Scripted(crew, "worker"))
        crew.workers[0].renew()
        tallies.append(tally)
        Course(Window(iter(map(job, range(20))), outputs, tally), crew, outputs, tally).run()

    threads = [threading.Thread(target=batch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [job(number).content for number in range(20)]
    assert sum(each.done for each in tallies) == 19 and sum(each.failed for each in tallies) == 1
    assert [each.over for each in tallies] == [20, 20]
    assert not [*(tmp_path / ".running").glob("*.claim")]


HALF = json.loads('"a cut-off emoji: \\ud83d"')


@pytest.mark.parametrize("outcome", [Failed(HALF), Refused(HALF), Lost(HALF), Away(HALF)])
def test_an_error_with_half_a_character_ends_nothing(run: Any, tmp_path: Path, outcome: Outcome) -> None:
    def fails(each: Job, worker: Scripted) -> Outcome:
        first_away = isinstance(outcome, Away) and len(worker.crew.begun) > 1
        return does(each, worker) if each.name == "job 2" or first_away else outcome

    tally, _ = run([replace(job(1), name=HALF), job(2)], fails, workers=1, attempts=1)
    assert tally.over == 2 and tally.done == (2 if isinstance(outcome, Away) else 1)
    parked = Outputs(tmp_path).parked(job(1).content)
    assert (parked is None) is isinstance(outcome, Away) and json.dumps(tally.facts()).encode() and tally.summary()
