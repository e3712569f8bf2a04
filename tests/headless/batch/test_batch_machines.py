"""A batch on a Ray cluster of several machines: machines that join and leave, and clusters that require a token."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import toy_jobs
from batch_runs import Batch, OutputCheck, batch_environment, without_ray_auth
from machines import PORT, Machine, machines, why_not
from waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install '.[scale]'"),
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or "namespaces work"),
]


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines without Ray and without settings for tokens."""
    with batch_environment() as environment, tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
        clean = without_ray_auth(environment, tmp_path / "home")
        del clean["RAY_TMPDIR"]
        with machines(["a", "b"], Path(folder), clean) as (head, other):
            yield head, other


def batch_on(head: Machine, folder: Path, jobs: int = 1, **busy: Any) -> Batch:
    (folder / "models").mkdir(exist_ok=True)
    line = {"workflow": toy_jobs.workflow(log=str(folder / "log"), **busy), "matrix": {"seeds": {"count": jobs}}}
    file, out = toy_jobs.write_jobs(folder / "jobs.jsonl", [line]), Path(tempfile.mkdtemp(dir=folder))
    options = ("--models", str(folder / "models"), "--ray", f"{head.address}:{PORT}")
    return Batch(file, out, options, head.environment, log=folder / "log", within=head.command)


def test_no_job_is_lost_when_machines_join_and_leave(two_machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Ray is told of one and of two GPUs, and starts a worker for each. A job ends when the gate file allows it."""
    head, other = two_machines
    head.environment["RAY_AUTH_MODE"] = other.environment["RAY_AUTH_MODE"] = "disabled"
    head.start_ray(head.address, gpus=1)
    jobs, gate = 12, tmp_path / "gate"
    gate.write_text("2")
    batch = batch_on(head, tmp_path, jobs, gate=str(gate))
    process = batch.start()

    def until(condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: batch.told.read_text(), meanwhile=process)

    def workers() -> set[int]:
        """The processes on the other machine that have started a job."""
        return {start["pid"] for start in batch.starts() if start["host"] == other.name}

    until(lambda: len(batch.whole()) == 2)
    other.start_ray(head.address, gpus=2)
    until(lambda: len(workers()) == 2)
    other.lose()
    lost = workers()
    gate.write_text("8")
    until(lambda: len(batch.whole()) >= 4)
    assert workers() == lost, "the remaining worker continues"
    other.start_ray(head.address, gpus=2)
    until(lambda: len(workers() - lost) == 2)
    gate.write_text(str(jobs))
    answer = batch.finish()
    assert answer["code"] == 0 and answer["done"] == jobs and answer["failed"] == 0 and answer["workers_lost"] == 2
    assert "disabled" not in answer["told"]
    found = OutputCheck.of(batch)
    assert found.seeds == list(range(jobs)) and not found.broken and found.redone == 0


@pytest.mark.parametrize(
    ("required", "cases"),
    [
        (
            True,
            [
                ("home", {}, ""),
                ("other", {}, "auth_token"),
                ("none", {}, "auth_token"),
                ("none", {"RAY_AUTH_TOKEN": "a" * 32}, ""),
            ],
        ),
        (
            False,
            [("none", {}, ""), ("home", {}, "RAY_AUTH_MODE=disabled"), ("home", {"RAY_AUTH_MODE": "disabled"}, "")],
        ),
    ],
    ids=["token required", "no token required"],
)
def test_cluster_accepts_only_matching_token(
    two_machines: tuple[Machine, Machine], tmp_path: Path, required: bool, cases: list[tuple[str, dict[str, str], str]]
) -> None:
    """cases: home folder, environment variables, expected error."""
    head, _ = two_machines
    for home, token in (("home", "a" * 32), ("other", "b" * 32)):
        (tmp_path / home / ".ray").mkdir(parents=True)
        (tmp_path / home / ".ray" / "auth_token").write_text(token)
    (tmp_path / "none").mkdir()
    if not required:
        head.environment["RAY_AUTH_MODE"] = "disabled"
    head.start_ray(head.address)  # with the token in its home folder
    head.environment.pop("RAY_AUTH_MODE", None)
    for home, variables, error in cases:
        batch = batch_on(head, tmp_path)
        batch.environment = head.environment | {"HOME": str(tmp_path / home)} | variables
        answer = batch.run()
        assert answer["code"] == 3 and error in answer["error"] if error else answer["done"] == 1, answer["told"]
