"""Fuzzing of server answers (ComfyUI 0.3.64, 0.33.0, a fork): read, or rejected with a message. Names stay in --out."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.errors import HeadlessError, OutputError
from comfyui_onediff_guard.headless.files import FileEntry, file_entries
from comfyui_onediff_guard.headless.hosts import input_images
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.server import answers
from comfyui_onediff_guard.headless.server.api import HttpResponse
from comfyui_onediff_guard.headless.workflow.graph import from_api
from comfyui_onediff_guard.headless.workflow.schema import from_object_info
from comfyui_onediff_guard.trust import foreign, paths
from fake_comfy import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import NASTY, mutated, mutated_text
from tiers import by_tier

ID = "cd7d1b4c-d1e8-4a72-80c7-12c138021bff"
GRAPH = from_api(picture())
PROBLEM = {"type": "required_input_missing", "message": "Required input is missing", "details": "x", "extra_info": {}}
SUBMITTED = (
    {"prompt_id": ID, "number": 0, "node_errors": {}},
    {"error": PROBLEM, "node_errors": {"2": {"errors": [PROBLEM], "dependent_outputs": ["2"], "class_type": "S"}}},
    {"error": "no prompt", "node_errors": []},
)
ITEM = [0, ID, GRAPH.to_api(), {"client_id": "abc", "create_time": 1795353806975}, ["2"]]
QUEUES = (
    {"queue_running": [ITEM], "queue_pending": [ITEM]},
    {"queue_running": [{"priority": 0, "prompt_id": ID}], "queue_pending": []},
)
FAULT = {"prompt_id": ID, "node_id": "2", "node_type": "SaveImage", "executed": ["1"], "exception_message": "hot\n"}
REPORT = {"plan": {"component": "denoiser", "dtype": "fp16", "guarded": True}, "steps": [{"stage": "denoiser"}]}
FILE = {"filename": "x_00001_.png", "subfolder": "", "type": "output"}
HISTORIES = (
    {
        "prompt": ITEM,
        "outputs": {"2": {"images": [FILE], "onediff_guard": [REPORT], "text": ["denoiser: fp16"]}},
        "status": {
            "status_str": "success",
            "completed": True,
            "messages": [["execution_start", {"prompt_id": ID}], ["execution_success", {"prompt_id": ID}]],
        },
        "meta": {"2": {"node_id": "2", "display_node": "2", "parent_node": None, "real_node_id": "2"}},
    },
    {"outputs": {}, "status": {"status_str": "error", "completed": False, "messages": [["execution_error", FAULT]]}},
    {"outputs": {}, "status": {"status_str": "error", "messages": ["execution_start", "execution_interrupted"]}},
)
EVENTS = (
    {"type": "executing", "data": {"node": "1", "display_node": "1", "prompt_id": ID}},
    {"type": "progress", "data": {"value": 1, "max": 2, "prompt_id": ID, "node": "1"}},
    {"type": "execution_error", "data": FAULT},
    {"type": "status", "data": {"status": {"exec_info": {"queue_remaining": 0}}, "sid": "abc"}},
)
NODES = (
    {
        "input": {
            "required": {"image": [["a.png"], {"image_upload": True}], "steps": ["INT", {"default": 20, "min": 1}]},
            "optional": {"mode": ["COMBO", {"options": ["a", "b"], "multiselect": False}], "mask": ["MASK"]},
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": ["EXTRA_PNGINFO"]},
        },
        "input_order": {"required": ["image"]},
        "output": ["IMAGE", ["a", "b"]],
        "output_is_list": [False, False],
        "output_node": False,
    },
)
UPLOADED = ({"name": "a.png", "subfolder": "sub", "type": "input"},)


def test_undamaged_answers_are_read_correctly() -> None:
    submitted = [answers.Submitted.model_validate(value) for value in SUBMITTED]
    assert [value.prompt_id for value in submitted] == [ID, None, None]
    assert "node 2 (SaveImage): Required input is missing: x" in submitted[1].refusal(GRAPH)
    assert submitted[2].refusal(GRAPH).endswith("no prompt")
    queues = [answers.Queue.model_validate(value) for value in QUEUES]
    assert all(queue.runs(ID) and queue.has(ID) and not queue.has("x") for queue in queues)
    assert queues[0].prompt_of("abc") == ID and queues[0].prompt_of("other") is None
    failures = [answers.HistoryEntry.model_validate(value).failure(GRAPH, "it") for value in HISTORIES]
    assert [str(failure) for failure in failures] == [
        "None",
        "node 2 (SaveImage) failed: error: hot",
        "The run was interrupted on the server, at node unknown.",
    ]
    events = [answers.event(json.dumps(value)) for value in EVENTS]
    assert [event and event.type for event in events] == ["executing", "progress", None, None]
    schema = from_object_info("LoadImage", NODES[0])
    assert [spec.options for spec in schema.inputs.values()] == [("a.png",), (), ("a", "b"), ()]
    assert answers.Uploaded.model_validate(UPLOADED[0]).path == "sub/a.png"


def _answer(data: bytes) -> HttpResponse:
    return HttpResponse("http://host/x", 200, data)


@settings(max_examples=by_tier(4_000, 40))
@given(data=st.one_of(*map(mutated_text, SUBMITTED)))
def test_damaged_submission_answers_are_read_or_rejected(data: bytes) -> None:
    with suppress(HeadlessError):
        submitted = _answer(data).fitting(answers.Submitted)
        refusal = submitted.refusal(GRAPH)
        assert len(refusal) < 100_000
        assert submitted.prompt_id is None or (0 < len(submitted.prompt_id) <= 200 and "/" not in submitted.prompt_id)


@settings(max_examples=by_tier(4_000, 40))
@given(data=st.one_of(*map(mutated_text, QUEUES)))
def test_damaged_queues_are_read_or_rejected(data: bytes) -> None:
    with suppress(HeadlessError):
        queue = _answer(data).fitting(answers.Queue)
        assert queue.has(ID) or not queue.runs(ID)
        assert isinstance(queue.prompt_of("abc"), str | None)


@settings(max_examples=by_tier(4_000, 40))
@given(data=st.one_of(*map(mutated_text, HISTORIES)))
def test_damaged_histories_are_read_or_rejected(data: bytes) -> None:
    """The history of a run, and everything derived from it."""
    with suppress(HeadlessError, foreign.Unreadable):
        entry = _answer(data).fitting(answers.HistoryEntry)
        failure = entry.failure(GRAPH, "http://host")
        assert len(str(failure)) < 100_000
        result = RunResult(entry.outputs, {}, [], 0.0)
        assert all(isinstance(line, str) for line in result.summaries())
        assert all(isinstance(stage["steps"], list) for stage in result.stages())
        for ui in entry.outputs.values():
            for file in file_entries(ui):
                assert isinstance(file.path, str)


@settings(max_examples=by_tier(3_000, 40))
@given(data=st.one_of(*map(mutated_text, EVENTS)))
def test_damaged_events_are_read_or_ignored(data: bytes) -> None:
    event = answers.event(data.decode(errors="replace"))
    assert event is None or event.type in ("executing", "progress")


@settings(max_examples=by_tier(3_000, 40))
@given(data=st.one_of(*map(mutated_text, NODES)))
def test_damaged_node_types_are_read_or_rejected(data: bytes) -> None:
    with suppress(HeadlessError, foreign.Unreadable):
        schema = from_object_info("LoadImage", _answer(data).fitting(dict[str, Any]))
        assert all(isinstance(spec.name, str) and isinstance(spec.options, tuple) for spec in schema.inputs.values())
        assert isinstance(schema.widgets, list)
        list(input_images.images_of(GRAPH, {"LoadImage": schema, "SaveImage": schema}, Path()))


@settings(max_examples=by_tier(1_000, 20))
@given(data=st.one_of(*map(mutated_text, UPLOADED)))
def test_uploaded_image_names_stay_inside_the_folder(data: bytes) -> None:
    with suppress(HeadlessError, paths.Outside):
        name = _answer(data).fitting(answers.Uploaded).path
        assert ".." not in Path(name).parts and not Path(name).is_absolute() and name.isprintable() is not None


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "out"
    (folder / "sub").mkdir(parents=True)
    (folder / "link").symlink_to(folder.parent)
    return folder


PARTS = st.sampled_from(["..", ".", "", "sub", "link", "a.png", "temp", "C:", "~", "\\", "//", "\0", "é", "x" * 300])
NAMES = st.one_of(
    st.text(max_size=20),
    st.lists(PARTS, max_size=5).map("/".join),
    st.lists(PARTS, max_size=5).map("\\".join),
    st.sampled_from([value for value in NASTY if isinstance(value, str)]),
)


@settings(max_examples=by_tier(4_000, 60))
@given(filename=NAMES, subfolder=NAMES, kind=st.sampled_from(["output", "temp", "x"]))
def test_result_names_stay_inside_the_output_folder(output: Path, filename: str, subfolder: str, kind: str) -> None:
    entry = FileEntry(filename, subfolder, kind)
    with suppress(OutputError):
        target = entry.folder_in(output) / filename
        assert target.resolve().is_relative_to(output.resolve())
        assert target.name == filename and len(filename.encode()) <= paths.MAX_PART


@settings(max_examples=by_tier(2_000, 30))
@given(entry=mutated(FILE))
def test_listed_files_stay_inside_the_output_folder(output: Path, entry: Any) -> None:
    with suppress(OutputError):
        for file in file_entries({"images": [entry], "more": entry if isinstance(entry, dict) else [entry]}):
            assert file.folder_in(output).resolve().is_relative_to(output.resolve())
