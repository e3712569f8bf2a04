"""The folder of outputs: complete or absent, and claimed by one command. And how long a worker keeps a model."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch import outputs as module
from comfyui_onediff_guard.headless.batch import ray_pool
from comfyui_onediff_guard.headless.batch.content import CacheKey, cache_key_of, images_of
from comfyui_onediff_guard.headless.batch.jobs import Job
from comfyui_onediff_guard.headless.batch.outputs import Outputs
from comfyui_onediff_guard.headless.batch.ray_pool import RayActor, Setup
from comfyui_onediff_guard.headless.batch.worker_pool import ENDS, End, JobOutcome, execute
from comfyui_onediff_guard.headless.errors import HeadlessError, OutputError, RunFailedError
from comfyui_onediff_guard.headless.hosts.local import read_local
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.workflow.graph import Graph, from_api
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from fake_comfy import picture
from PIL import Image

CONTENT = "0123456789abcdef" * 2
JOB = Job("a job", Graph({}), CONTENT, CacheKey("m", "p", "s"))


def test_finished_job_is_published_and_not_run_again(tmp_path: Path) -> None:
    def run_once(graph: Graph, output_dir: Path) -> RunResult:
        (output_dir / "sub").mkdir()
        (file := output_dir / "sub" / "a.txt").write_text("made")
        return RunResult({"1": {"text": ["a line"], "onediff_guard": [{}]}}, {}, [file], 1.5)

    outputs = Outputs(tmp_path / "out")
    assert execute(JOB, outputs, run_once, "here") == JobOutcome(End.DONE, seconds=1.5)
    folder = tmp_path / "out" / CONTENT
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == ["job.json", "sub", "sub/a.txt"]
    record = json.loads((folder / "job.json").read_text())
    assert record["files"] == ["sub/a.txt"] and record["name"] == "a job" and record["summaries"] == ["a line"]
    assert not [*(tmp_path / "out" / ".running").iterdir()]

    def never(*_: Any, **__: Any) -> RunResult:
        raise AssertionError("the job is done already")

    assert execute(JOB, outputs, never, "here").end is End.DONE


@pytest.mark.parametrize(("error", "end"), [*ENDS, (RunFailedError, End.FAILED)])
def test_failed_job_leaves_no_file(tmp_path: Path, error: type[HeadlessError], end: End) -> None:
    def fails(graph: Graph, output_dir: Path) -> RunResult:
        (output_dir / "half").write_text("half")
        raise error("no")

    outputs = Outputs(tmp_path)
    assert execute(JOB, outputs, fails, "here") == JobOutcome(end, "no")
    assert not outputs.has(CONTENT) and not [*tmp_path.rglob("half")]


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("change", [lambda file: Image.new("RGB", (9, 9)).save(file), Path.unlink])
def test_result_of_changed_image_is_not_kept(tmp_path: Path, when: str, change: Callable[[Path], None]) -> None:
    file = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(file)
    workflow = read_local(picture())
    job = replace(JOB, graph=workflow[0], images=images_of(*workflow, tmp_path))

    def run(graph: Graph, output_dir: Path) -> RunResult:
        assert when == "during", "it is not run in vain"
        change(file)
        return RunResult({}, {}, [], 0.0)

    if when == "before":
        change(file)
    outcome = execute(job, outputs := Outputs(tmp_path / "out"), run, "here")
    assert outcome.end is End.FAILED and "The image 'a.png' changed while the batch ran" in outcome.error
    assert not outputs.has(CONTENT)


def test_second_output_of_same_job_is_discarded(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    with outputs.arriving(CONTENT) as (late, _):
        (late / "by").write_text("the second")
        with outputs.arriving(CONTENT) as (early, _):
            (early / "by").write_text("the first")
    assert (tmp_path / CONTENT / "by").read_text() == "the first"
    assert not [*(tmp_path / ".running").iterdir()]


def test_unrelated_folder_at_output_path_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / CONTENT).mkdir()
    (tmp_path / CONTENT / "somebody's").touch()
    outputs = Outputs(tmp_path)
    with pytest.raises(OutputError, match="Cannot write"), outputs.arriving(CONTENT):
        ...
    assert not outputs.has(CONTENT) and (tmp_path / CONTENT / "somebody's").exists()


def test_parked_job_keeps_its_reason(tmp_path: Path) -> None:
    outputs, file = Outputs(tmp_path), tmp_path / "parked" / f"{CONTENT}.json"
    assert not outputs.parked(CONTENT)
    outputs.park(CONTENT, "a", "it dies", 3)
    assert outputs.parked(CONTENT) == "it dies" and json.loads(file.read_text())["attempts"] == 3
    file.write_text("{")
    assert not outputs.parked(CONTENT), "an unreadable file has no reason"
    for _ in range(2):
        outputs.unpark(CONTENT)
        assert not file.exists()


def test_full_disk_while_publishing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    outputs = Outputs(tmp_path)
    monkeypatch.setattr(module.json, "dump", full)
    with pytest.raises(OutputError, match="the disk is full"), outputs.arriving(CONTENT) as (folder, _):
        (folder / "a").touch()
    assert not (tmp_path / CONTENT).exists() and not [*(tmp_path / ".running").iterdir()]


HOLD = """
import sys, time
from pathlib import Path
from comfyui_onediff_guard.headless.batch.outputs import Outputs
claim = Outputs(Path(sys.argv[1])).claim("c")
print(claim is not None, flush=True)
time.sleep(3600)
"""


def test_claim_of_killed_command_is_released(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    outputs.ensure()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "True\n"
        mine = outputs.claim("c")
        other.kill()
    claim = outputs.claim("c")
    assert mine is None and claim and outputs.claim("c") is None
    outputs.release("c", claim)
    assert not [*tmp_path.rglob("*.claim")] and outputs.claim("c")


def test_claim_succeeds_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "locked", lambda _: False)
    outputs = Outputs(tmp_path)
    outputs.ensure()
    claims = [outputs.claim("c"), outputs.claim("c")]
    assert all(claims)


def graph(**changes: Any) -> Graph:
    inputs = {
        "1": {"model": "m", "precision": "bf16", "backend": "auto"},
        "2": {"pipeline": ["1", 0], "width": 64, "height": 64, "frames": 9, "steps": 20, "seed": 1, "scheduler": "x"},
        "3": {"text": "a boat", "clip": ["1", 0], "sampler_name": "euler", "ckpt_name": "c", "length": 8},
    }
    for name, value in changes.items():
        next(node for node in inputs.values() if name in node)[name] = value
    return from_api({number: {"class_type": f"N{number}", "inputs": node} for number, node in inputs.items()})


@pytest.mark.parametrize(
    ("changes", "changed_fields"),
    [
        ({"seed": 2, "steps": 3, "text": "a cat", "sampler_name": "dpm"}, []),
        ({"model": "other"}, ["model"]),
        ({"ckpt_name": "other"}, ["model"]),
        ({"precision": "fp16"}, ["plan"]),
        ({"width": 128}, ["shape"]),
        ({"frames": 17, "model": "other"}, ["model", "shape"]),
    ],
)
def test_cache_key_depends_on_model_plan_and_shape(changes: dict[str, Any], changed_fields: list[str]) -> None:
    before, after = cache_key_of(graph()), cache_key_of(graph(**changes))
    assert [name for name in CacheKey._fields if getattr(before, name) != getattr(after, name)] == changed_fields


def test_worker_keeps_last_model_until_model_or_plan_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "_end_with", lambda _: None)  # a thread that waits for Ray's end
    loaded: dict[str, weakref.ref[Any]] = {}
    alive: list[set[str]] = []

    def run(graph: Graph, output_dir: Path, **_: Any) -> RunResult:
        """Pretend to load the model that the job is named after."""
        alive.append({name for name, handle in loaded.items() if handle() is not None})
        handle = object.__new__(PipelineHandle)
        loaded[model] = weakref.ref(handle)
        if model == "fails":
            raise RunFailedError("no")
        return RunResult({}, {"1": (handle, 1)}, [], 1.0)

    actor = RayActor(Setup((), tmp_path, tmp_path, "", None, run))
    cases = [("a", "p", ""), ("a", "p", "larger"), ("b", "p", ""), ("b", "q", ""), ("b", "q", ""), ("fails", "q", "")]
    for number, (model, plan, shape) in enumerate([*cases, ("b", "q", "")]):
        actor.run(Job(model, Graph({}), f"{number:032x}", CacheKey(model, plan, shape)))
    assert alive == [set(), {"a"}, set(), set(), {"b"}, set(), set()]
