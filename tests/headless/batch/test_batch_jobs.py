"""A file of jobs: valid and invalid lines, the jobs that they give, and the hash that identifies a job."""

from __future__ import annotations

import gc
import io
import itertools
import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_jobs
from comfyui_onediff_guard.headless.batch import content
from comfyui_onediff_guard.headless.batch.batch_run import BatchStats, JobQueue
from comfyui_onediff_guard.headless.batch.content import content_of, images_of
from comfyui_onediff_guard.headless.batch.jobs import MAX_LINE, Job, JobsFile, Unmade
from comfyui_onediff_guard.headless.batch.outputs import Outputs
from comfyui_onediff_guard.headless.errors import RunFailedError, WorkflowError
from comfyui_onediff_guard.headless.hosts.local import read_local
from comfyui_onediff_guard.headless.workflow.graph import read_json
from fake_comfy import picture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from templates import ui_file
from tiers import by_tier

JobsOf = Callable[..., JobsFile]


def line(**more: Any) -> dict[str, Any]:
    return {"workflow": toy_jobs.workflow(), **more}


def values(job: Any, *names: str) -> tuple[Any, ...]:
    return tuple(job.graph.nodes["1"].inputs[name] for name in names)


def test_job_line_sets_workflow_inputs_and_name(jobs_file: JobsOf, tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(json.dumps(toy_jobs.workflow()))
    file = jobs_file({"workflow": "toy.json", "set": ["1.seed=7", "Busy.model=b"], "name": "seven"}, line())
    first, second = file
    assert file.count() == 2
    assert (first.name, second.name) == ("seven", "line 2")
    assert values(first, "seed", "model") == (7, "b") and values(second, "seed", "model") == (0, "a")


def test_jobs_file_that_breaks_during_a_batch_is_reported(jobs_file: JobsOf) -> None:
    file = jobs_file(line(), line())
    assert file.count() == 2
    jobs = iter(file)
    file.file.write_text("{broken")
    with pytest.raises(RunFailedError, match=r"changed while the batch ran: .*line 1: it is not JSON"):
        list(jobs)


def test_matrix_yields_all_combinations_and_varies_seed_fastest(jobs_file: JobsOf) -> None:
    matrix = {"inputs": {"1.model": ["a", "b"], "Busy.width": [8, 16]}, "seeds": {"first": 5, "count": 3}}
    file = jobs_file(line(matrix=matrix, name="all"))
    found = list(file)
    assert file.count() == len(found) == 12
    assert [values(job, "model", "width", "seed") for job in found] == [
        *itertools.product(("a", "b"), (8, 16), (5, 6, 7))
    ]
    assert [job.name for job in found[:2]] == ["all #1", "all #2"]
    assert len({job.content for job in found}) == 12
    assert len({job.cache_key for job in found}) == 4


def test_named_matrix_axes_set_their_inputs(root: Path, tmp_path: Path) -> None:
    matrix = {
        "prompts": ['"quoted"', "1e3"],
        "seeds": [1, 2**63],
        "sizes": ["96x64x9", "128x96"],
        "precisions": ["bf16", "fp32"],
    }
    file = toy_jobs.write_jobs(tmp_path / "jobs", [{"workflow": "cogvideox_text_to_video.json", "matrix": matrix}])
    jobs = JobsFile(file, workflows=root / "workflows" / "api", input_dir=None, read=read_local)
    found = [job.graph for job in jobs]
    assert len(found) == 16
    seen = [
        (
            graph.nodes["1"].inputs["precision"],
            tuple(graph.nodes["4"].inputs[name] for name in ("width", "height", "frames")),
            graph.nodes["3"].inputs["prompt"],
            graph.nodes["4"].inputs["seed"],
        )
        for graph in found
    ]
    sizes = [(96, 64, 9), (128, 96, 49)]  # the second size has no frames, so the default counts
    assert seen == [*itertools.product(("bf16", "fp32"), sizes, ('"quoted"', "1e3"), (1, 2**63))]
    assert {graph.nodes["4"].inputs["precision"] for graph in found} == {"inherit"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: it is not JSON"),
        ("[]", "line 1: it is .*: input should be an object"),
        ('{"set": []}', "line 1: workflow is missing"),
        ('{"workflow": "a.json", "sets": []}', "line 1: sets is "),
        ('{"workflow": 5}', "line 1: workflow"),
        ('{"workflow": "../a.json"}', r"line 1: '../a.json' leads out of its folder.*--workflows"),
        ('{"workflow": "nowhere.json"}', "line 1: Cannot read the workflow"),
        ('{"workflow": {}}', "line 1: The workflow is empty"),
        ('{"workflow": TOY, "set": ["seed=1"]}', "line 1: --set seed=1: expected NODE.INPUT=VALUE"),
        ('{"workflow": TOY, "set": ["9.seed=1"]}', "line 1: The workflow has no node '9'"),
        ('{"workflow": TOY, "matrix": {"seeds": ["1"]}}', "line 1: matrix.seeds"),
        ('{"workflow": TOY, "matrix": {"seeds": [-1]}}', "line 1: matrix.seeds"),
        ('{"workflow": TOY, "matrix": {"sizes": ["8x"]}}', "line 1: matrix.sizes"),
        ('{"workflow": TOY, "matrix": {"sizes": ["8x8"]}}', '"sizes" needs exactly one node .* Found: none'),
        ('{"workflow": TOY, "matrix": {"prompts": ["a"]}}', '"prompts" needs exactly one node .* Found: none'),
        ('{"workflow": TOY, "matrix": {"precisions": ["fp32"]}}', "sets no precision"),
        ('{"workflow": TOY, "matrix": {"inputs": {"1.no": [1]}}}', "has no input 'no'"),
        ('{"workflow": TOY, "matrix": {"inputs": {"1.model": []}}}', "line 1: matrix.inputs.1.model"),
        ('{"workflow": TOY, "matrix": {"seeds": {"count": 5000000}, "inputs": {"1.width": [1, 2, 3]}}}', "15,000,000"),
        ('{"workflow": TOY, "matrix": {"seeds": []}}', "line 1: matrix.seeds"),
        ('{"workflow": TOY, "matrix": {"sizes": [], "seeds": [1]}}', "line 1: matrix.sizes"),
        ('{"workflow": TOY, "set": ["1.sed=1"]}', "line 1: --set 1.sed: node 1 .* has no input 'sed'. Its inputs: sec"),
        ('{"workflow": TOY},\n{"workflow": TOY}', "line 1: it is not JSON .trailing characters"),
        ("\0" * 50, "line 1: it is not JSON"),
        ('{"workflow": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1: it is not JSON .recursion"),
        ('\n\n{"workflow": 5}', "line 3: workflow"),
        ('{"workflow": TOY}\r\n\r\n{"workflow": 5}\r\n', "line 3: workflow"),
        ("\ufeff \r\n\t\n", "holds no jobs"),
        ("", "holds no jobs"),
    ],
)
def test_invalid_jobs_file_is_rejected_with_reason(jobs_file: JobsOf, text: str, message: str) -> None:
    file = jobs_file(text.replace("TOY", json.dumps(toy_jobs.workflow())))
    with pytest.raises(WorkflowError, match=message):
        file.count()


@pytest.mark.parametrize(
    ("text", "jobs"),
    [(b"\xef\xbb\xbfTOY\r\n\r\nTOY\r\n", 2), (b"TOY\nTOY\n \nTOY", 3)],
    ids=["byte order mark and Windows line ends", "repeated line and no final line end"],
)
def test_jobs_file_accepts_bom_crlf_and_blank_lines(jobs_file: JobsOf, text: bytes, jobs: int) -> None:
    file = jobs_file("")
    file.file.write_bytes(text.replace(b"TOY", json.dumps({"workflow": toy_jobs.workflow()}).encode()))
    assert file.count() == jobs
    assert len({job.content for job in file if isinstance(job, Job)}) == 1


@given(text=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(max_examples=by_tier(500, 60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_in_jobs_file_are_rejected(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "jobs").write_bytes(b"\n" + text)
    jobs = JobsFile(tmp_path / "jobs", workflows=tmp_path, input_dir=None, read=toy_jobs.read)
    with pytest.raises(WorkflowError, match=r"jobs, line [0-9]+: |holds no jobs"):
        jobs.count()


def test_invalid_matrix_combination_is_reported_and_others_are_queued(tmp_path: Path) -> None:
    line = {
        "workflow": picture(),
        "matrix": {"inputs": {"1.image": ["a.png", "../b.png", "c.png"]}},
        "name": "pictures",
    }
    file = toy_jobs.write_jobs(tmp_path / "jobs", [line])
    jobs = JobsFile(file, workflows=tmp_path, input_dir=tmp_path, read=read_local)
    assert jobs.count() == 3
    first, second, third = jobs
    assert isinstance(first, Job) and isinstance(third, Job)
    assert isinstance(second, Unmade) and second.name == "pictures #2" and "jobs, line 1: " in second.error
    stats = BatchStats(3, io.StringIO())
    queue = JobQueue(jobs, Outputs(tmp_path / "out"), stats)
    assert queue.fill() and len(queue.take(lambda _: True)) == 2
    assert stats.failed == 1 and stats.faults == [{"name": second.name, "content": "no job", "error": second.error}]
    file = toy_jobs.write_jobs(tmp_path / "first", [line | {"matrix": {"inputs": {"1.image": ["../b.png", "a.png"]}}}])
    with pytest.raises(WorkflowError, match="first, line 1: "):
        JobsFile(file, workflows=tmp_path, input_dir=tmp_path, read=read_local).count()


WORDS = st.sampled_from(["workflow", "set", "matrix", "name", "seeds", "sizes", "prompts", "inputs", "1.seed", "first"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | WORDS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4))


@given(matrix=VALUES, changes=VALUES, more=st.dictionaries(WORDS, VALUES, max_size=2))
@settings(max_examples=by_tier(500, 60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_job_line_gives_jobs_or_is_rejected(tmp_path: Path, matrix: Any, changes: Any, more: Any) -> None:
    line = {"workflow": toy_jobs.workflow(), **more, "matrix": matrix, "set": changes}
    file = toy_jobs.write_jobs(tmp_path / "jobs", [line])
    jobs = JobsFile(file, workflows=tmp_path, input_dir=None, read=toy_jobs.read)
    with suppress(WorkflowError):
        assert jobs.count() >= 1 and next(iter(jobs))


def test_folder_or_overlong_line_is_rejected_as_jobs_file(jobs_file: JobsOf, tmp_path: Path) -> None:
    file = jobs_file("")
    file.file = tmp_path
    with pytest.raises(WorkflowError, match="There is no jobs file"):
        file.count()
    file.file = tmp_path / "long"
    file.file.write_bytes(b" " * (MAX_LINE + 2))
    with pytest.raises(WorkflowError, match="a line of more than"):
        file.count()


def test_jobs_are_generated_lazily(jobs_file: JobsOf) -> None:
    """A million jobs take no more memory than a few."""
    file = jobs_file(line(matrix={"seeds": {"count": 1_000_000}}))
    assert file.count() == 1_000_000
    jobs = iter(file)
    next(jobs)
    tracemalloc.start()
    try:
        for _ in range(200):
            next(jobs)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(2000):
            next(jobs)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000


def hash_of(workflow: dict[str, Any], input_dir: Path | None = None) -> str:
    graph, schemas = read_local(workflow)
    return content_of(graph, images_of(graph, schemas, input_dir))


def test_content_hash_ignores_titles_and_order_but_not_inputs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def workflow(**sampler: Any) -> dict[str, Any]:
        made = json.loads((root / "workflows/api/cogvideox_text_to_video.json").read_text())
        made["4"]["inputs"].update(sampler)
        return made

    first = hash_of(workflow())
    assert len(first) == 32 and first == hash_of(workflow())
    assert first == hash_of(workflow(steps=50.0, guidance_scale=6)), "the same numbers"
    retitled = workflow()
    retitled["4"]["_meta"]["title"] = "Another"
    assert first == hash_of(dict(reversed(retitled.items()))), "titles and order do not matter"
    others = [hash_of(workflow(seed=43)), hash_of(workflow(steps=50.5)), hash_of(workflow(scheduler="DPM"))]
    assert len({first, *others}) == 4
    ui = hash_of(dict(read_json(ui_file("cogvideox_text_to_video"))))
    assert ui == first, "both formats of a workflow are the same job"
    graph, _ = read_local(workflow())
    assert content_of(replace(graph, guarded=True), {}) != first == content_of(graph, {})
    monkeypatch.setattr(content, "version_that_matters", lambda: "9.9")
    assert hash_of(workflow()) != first


def test_content_hash_depends_on_image_bytes(tmp_path: Path) -> None:
    workflow = picture()
    missing = hash_of(workflow, tmp_path)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    red = hash_of(workflow, tmp_path)
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "b.png")
    assert hash_of(workflow, tmp_path) == red
    (tmp_path / "b.png").replace(tmp_path / "a.png")
    blue = hash_of(workflow, tmp_path)
    assert len({missing, red, blue}) == 3
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(WorkflowError, match="is not an image"):
        hash_of(workflow, tmp_path)
    with pytest.raises(WorkflowError, match="leads out of its folder"):
        hash_of(picture("../a.png"), tmp_path)
