"""A cluster that changes while a batch runs: a machine that joins gets work, one that leaves loses none."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import toy_jobs
from batch_runs import HANG_SECONDS, TOYS, Batch, Found, surroundings
from machines import PORT, Machine, machines, why_not
from waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install '.[scale]'"),
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or "namespaces work"),
]


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, of which none has a Ray yet."""
    with surroundings() as environment, tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
        of_all = {name: value for name, value in environment.items() if name != "RAY_TMPDIR"}
        (tmp_path / "models").mkdir()
        with machines(["a", "b"], Path(folder), of_all) as (head, other):
            yield head, other


class Running:
    """A batch on a machine's cluster, in a process of its own."""

    def __init__(self, head: Machine, folder: Path, jobs: int) -> None:
        log = folder / "log"
        line = {"workflow": toy_jobs.workflow(log=str(log), seconds=1.0), "matrix": {"seeds": {"count": jobs}}}
        file = toy_jobs.write_jobs(folder / "jobs.jsonl", [line])
        self.batch = Batch(file, folder / "out", (), head.environment, log=log)
        words = [sys.executable, "-c", TOYS, "batch", str(file), "--out", str(folder / "out"), "--json"]
        words += ["--models", str(folder / "models"), "--ray", f"{head.address}:{PORT}", "--attempts", "9"]
        with (folder / "told").open("w") as told:
            self.process = subprocess.Popen(
                head.command(*words), env=head.environment, cwd=folder, stdout=subprocess.PIPE, stderr=told, text=True
            )

    def processes_of(self, machine: Machine) -> set[str]:
        """The workers there that have done a job."""
        workers = [json.loads((path / "job.json").read_text())["worker"] for path in self.batch.whole()]
        return {worker for worker in workers if worker.startswith(f"{machine.name}:")}

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, "the batch comes so far", meanwhile=self.process)

    def finish(self) -> dict[str, int]:
        out, _ = self.process.communicate(timeout=HANG_SECONDS)
        return json.loads(out)


def test_a_machine_joins_and_leaves_and_comes_back(apart: tuple[Machine, Machine], tmp_path: Path) -> None:
    """With one GPU and two, as far as Ray knows: a worker for each."""
    head, other = apart
    head.start_ray(head.address, gpus=1)
    jobs = 180
    running = Running(head, tmp_path, jobs)
    running.until(lambda: len(running.batch.whole()) >= 2)
    assert not running.processes_of(other)
    other.start_ray(head.address, gpus=2)
    running.until(lambda: len(running.processes_of(other)) == 2)
    other.lose()
    had, done = running.processes_of(other), len(running.batch.whole())
    running.until(lambda: len(running.batch.whole()) >= done + 4)
    assert running.processes_of(other) == had, "the one that is left goes on"
    other.start_ray(head.address, gpus=2)
    running.until(lambda: len(running.processes_of(other) - had) == 2)
    answer = running.finish()
    assert running.process.returncode == 0 and answer["done"] == jobs and answer["failed"] == 0
    assert 1 <= answer["workers_lost"] <= 2
    found = Found.in_(running.batch)
    assert found.seeds == list(range(jobs)) and not found.broken and found.redone == 0
