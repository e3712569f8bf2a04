"""A cluster that changes while a batch runs: a machine that joins gets work, one that leaves loses none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import toy_jobs
from batch_runs import Batch, Found, surroundings
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


def test_a_machine_joins_and_leaves_and_comes_back(apart: tuple[Machine, Machine], tmp_path: Path) -> None:
    """With one GPU and two, as far as Ray knows: a worker for each. Jobs end when the gate lets them."""
    head, other = apart
    head.start_ray(head.address, gpus=1)
    jobs, log, gate = 12, tmp_path / "log", tmp_path / "gate"
    gate.write_text("2")
    toy = toy_jobs.workflow(log=str(log), gate=str(gate))
    file = toy_jobs.write_jobs(tmp_path / "jobs.jsonl", [{"workflow": toy, "matrix": {"seeds": {"count": jobs}}}])
    options = ("--models", str(tmp_path / "models"), "--ray", f"{head.address}:{PORT}")
    batch = Batch(file, tmp_path / "out", options, head.environment, log=log, within=head.command)
    process = batch.start()

    def until(condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: batch.told.read_text(), meanwhile=process)

    def workers() -> set[int]:
        """The processes on the other machine that have begun a job."""
        return {start["pid"] for start in batch.starts() if start["host"] == other.name}

    until(lambda: len(batch.whole()) == 2)
    other.start_ray(head.address, gpus=2)
    until(lambda: len(workers()) == 2)
    other.lose()
    lost = workers()
    gate.write_text("8")
    until(lambda: len(batch.whole()) >= 4)
    assert workers() == lost, "the one that is left goes on"
    other.start_ray(head.address, gpus=2)
    until(lambda: len(workers() - lost) == 2)
    gate.write_text(str(jobs))
    answer = batch.finish()
    assert answer["code"] == 0 and answer["done"] == jobs and answer["failed"] == 0 and answer["workers_lost"] == 2
    assert "disabled" not in answer["told"]
    found = Found.in_(batch)
    assert found.seeds == list(range(jobs)) and not found.broken and found.redone == 0
