"""The folder of outputs: whole or not there, and all that a batch knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch import outputs as module
from comfyui_onediff_guard.headless.batch.execution import (
    CannotWrite,
    Done,
    Failed,
    Refused,
    WorkerDied,
    WorkerUnavailable,
    execute,
)
from comfyui_onediff_guard.headless.batch.jobs import Job
from comfyui_onediff_guard.headless.batch.outputs import Outputs, Parked
from comfyui_onediff_guard.headless.batch.pipeline_cache import CacheKey
from comfyui_onediff_guard.headless.errors import (
    HostError,
    OutputError,
    RunFailedError,
    ServerLostError,
    WorkflowError,
)
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.workflow.graph import Graph

CONTENT = "0123456789abcdef" * 2
JOB = Job("a job", Graph({}), CONTENT, CacheKey("m", "p", "s"))


def ran(graph: Graph, output_dir: Path) -> RunResult:
    (output_dir / "sub").mkdir()
    file = output_dir / "sub" / "a.txt"
    file.write_text("made")
    entry = {"filename": "a.txt", "subfolder": "sub", "type": "output"}
    stage = {"steps": [], "graphs": 3, "graphs_kept": 1}
    return RunResult({"1": {"images": [entry], "onediff_guard": [stage]}}, {}, [file], 1.5)


def test_what_a_job_made_takes_its_place_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfyui_onediff_guard.headless.hosts.result._checked", lambda report: report)
    outputs = Outputs(tmp_path / "out")
    assert execute(JOB, outputs, ran, "here") == Done(1.5, 2)
    assert outputs.has(CONTENT)
    folder = tmp_path / "out" / CONTENT
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == ["job.json", "sub", "sub/a.txt"]
    record = json.loads((folder / "job.json").read_text())
    assert record["files"] == ["sub/a.txt"] and record["name"] == "a job"
    assert record["graphs_compiled"] == 2
    assert not [*(tmp_path / "out" / ".running").iterdir()]

    def never(*_: Any, **__: Any) -> RunResult:
        raise AssertionError("it is done")

    assert isinstance(execute(JOB, outputs, never, "here"), Done)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (WorkflowError("no"), Refused("no")),
        (RunFailedError("no"), Failed("no")),
        (ServerLostError("gone"), WorkerDied("gone")),
        (HostError("away"), WorkerUnavailable("away")),
        (OutputError("full"), CannotWrite("full")),
    ],
)
def test_a_job_that_fails_leaves_nothing(tmp_path: Path, error: Exception, outcome: object) -> None:
    def fails(graph: Graph, output_dir: Path) -> RunResult:
        (output_dir / "half").write_text("half")
        raise error

    outputs = Outputs(tmp_path)
    assert execute(JOB, outputs, fails, "here") == outcome
    assert not outputs.has(CONTENT) and not [*tmp_path.rglob("half")]


def test_the_second_of_two_that_made_the_same_gives_way(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    with outputs.arriving(CONTENT) as late:
        (late.folder / "by").write_text("the second")
        with outputs.arriving(CONTENT) as early:
            (early.folder / "by").write_text("the first")
    assert (tmp_path / CONTENT / "by").read_text() == "the first"
    assert not [*(tmp_path / ".running").iterdir()]


def test_a_folder_that_is_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / CONTENT).mkdir()
    (tmp_path / CONTENT / "somebody's").touch()
    outputs = Outputs(tmp_path)
    with pytest.raises(OutputError, match="Cannot write"), outputs.arriving(CONTENT):
        ...
    assert not outputs.has(CONTENT) and (tmp_path / CONTENT / "somebody's").exists()


def test_why_a_job_is_parked_is_kept(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    assert outputs.parked(CONTENT) is None
    parked = Parked(content=CONTENT, name="a", error="it dies", attempts=3)
    outputs.park(parked)
    assert outputs.parked(CONTENT) == parked
    (tmp_path / "parked" / f"{CONTENT}.json").write_text("{")
    assert outputs.parked(CONTENT) is None, "what cannot be read is no reason"
    outputs.unpark(CONTENT)
    outputs.unpark(CONTENT)


def test_a_disk_that_fails_while_publishing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    outputs = Outputs(tmp_path)
    monkeypatch.setattr(module.json, "dump", full)
    with pytest.raises(OutputError, match="No space left"), outputs.arriving(CONTENT) as made:
        (made.folder / "a").touch()
    assert not (tmp_path / CONTENT).exists() and not [*(tmp_path / ".running").iterdir()]
