"""The client for a running ComfyUI, with a stand-in server that behaves like old and new versions."""

from __future__ import annotations

import asyncio
import base64
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.errors import (
    HeadlessError,
    HostError,
    InterruptedRunError,
    OutputError,
    RunFailedError,
    UnknownNodesError,
    WorkflowError,
)
from comfyui_onediff_guard.headless.hosts.result import RunProgress, RunResult
from comfyui_onediff_guard.headless.server import api, follow
from comfyui_onediff_guard.headless.server.answers import SUMMARIES, HistoryEntry
from comfyui_onediff_guard.headless.server.follow import run_on_server
from comfyui_onediff_guard.headless.workflow.settings import Setting
from comfyui_onediff_guard.trust import foreign
from PIL import Image
from waiting import HANG_SECONDS

RunThere = Callable[..., RunResult]
TIME = 2.0  # timeout in s of a run that hangs: even a busy machine has submitted it by then


async def silent_success(server: Any) -> None:
    """The websocket sends nothing."""
    server.finish({"2": {}})


async def broken_socket(server: Any) -> None:
    for socket in list(server.sockets):
        await socket.close()
    server.finish({"2": {}})


async def node_error(server: Any) -> None:
    fault = {"node_id": "1", "exception_type": "builtins.ValueError", "exception_message": "too hot\n"}
    await server.send("execution_error", **fault)
    server.finish({}, "error", [["execution_start", {}], ["execution_error", fault]])


async def interrupted(server: Any) -> None:
    server.finish({}, "error", [["execution_interrupted", {"node_id": "1"}]])
    await server.send("execution_interrupted", node_id="1")


async def success_in_the_fork(server: Any) -> None:
    """The pip-installable fork: queue entries are dictionaries, and the history's messages plain strings."""
    server.running[:] = [{"priority": 0, "prompt_id": server.prompt_id}]
    asked = asyncio.Event()

    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        answer = await handler(request)
        if request.path == "/queue":
            asked.set()
        return answer

    server.around = note
    await asked.wait()
    server.finish({"2": {}}, messages=["execution_start", "execution_success"])


async def error_in_the_fork(server: Any) -> None:
    server.finish({}, "error", ["execution_start", "execution_error: too hot"])


async def interrupted_in_the_fork(server: Any) -> None:
    server.finish({}, "error", ["execution_start", "execution_interrupted"])


async def endless_record(server: Any) -> None:
    """As of a workflow with large images in it."""
    server.finish({"2": {"text": ["x" * api.ANSWER_BYTES]}})


async def vanish(server: Any) -> None:
    """Somebody deletes the run, or the server restarts."""
    server.running.clear()


async def hang(server: Any) -> None:
    await server.send("executing", node="1")


def test_run_reports_progress_and_fetches_files(comfy: Any, there: RunThere, tmp_path: Path) -> None:
    seen: list[RunProgress] = []

    async def succeed_once_told(server: Any) -> None:
        await server.send("executing", node="1")
        await server.send("progress", node="1", value=1, max=2)
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        server.finish({"2": {"images": [{"filename": "a_00001_.png", "subfolder": "sub", "type": "output"}]}})

    comfy.script = succeed_once_told
    result = there(on_progress=seen.append, changes=[Setting("1", "width", "16")])
    assert result.files == [tmp_path / "out" / "sub" / "a_00001_.png"]
    assert result.files[0].read_bytes() == b"picture"
    assert seen == [RunProgress("node 1 (Some Noise)"), RunProgress("node 1 (Some Noise)", 1, 2)]
    assert comfy.requests[0][1]["prompt"]["1"]["inputs"]["width"] == 16


def test_guard_option_needs_pack_and_is_sent_to_server(comfy: Any, there: RunThere) -> None:
    with pytest.raises(UnknownNodesError, match="no node type OneDiffGuardNaNGuardNative"):
        there(guard=True)
    assert not comfy.requests, "nothing runs on a server without the pack"
    comfy.object_info[follow.GUARD] = {"input": {"required": {}}}
    there(guard=True)
    there()
    asked = [body.get("extra_data", {}).get("onediff_guard") for path, body in comfy.requests if path == "prompt"]
    assert asked == [True, None]


@pytest.mark.parametrize(
    ("prompt", "guards"),
    [
        ([0, "id", {}, {SUMMARIES: ["2 steps, 1 recomputed in fp32", 3]}, []], ("2 steps, 1 recomputed in fp32",)),
        ([0, "id", {}, {SUMMARIES: "no list"}, []], ()),
        ([0, "id", {}, None, []], ()),
        ([0, "id"], ()),
        ({"3": {}}, ()),
        (None, ()),
    ],
)
def test_summary_contains_lines_of_inserted_guards(prompt: Any, guards: tuple[str, ...]) -> None:
    entry = foreign.fitting(HistoryEntry, {"outputs": {}, "prompt": prompt})
    assert entry.guards() == guards
    assert RunResult({}, {}, [], 0.0, entry.guards()).summaries() == [*guards]
    assert host.SUMMARIES == SUMMARIES


@pytest.mark.parametrize("script", [silent_success, broken_socket, success_in_the_fork])
def test_result_is_read_from_history_if_websocket_fails(comfy: Any, there: RunThere, script: Any) -> None:
    comfy.script = script
    assert there().outputs == {"2": {}}


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (node_error, RunFailedError, r"^node 1 \(Some Noise\) failed: ValueError: too hot$"),
        (interrupted, InterruptedRunError, r"interrupted on the server, at node 1 \(Some Noise\)"),
        (error_in_the_fork, RunFailedError, r"reports that the run failed, .*too hot"),
        (interrupted_in_the_fork, InterruptedRunError, "interrupted on the server"),
        (vanish, RunFailedError, "no longer knows the run the-prompt"),
        (endless_record, RunFailedError, "The run is done: look into the output folder"),
    ],
)
def test_failed_runs_raise(comfy: Any, there: RunThere, script: Any, error: type[HeadlessError], message: str) -> None:
    comfy.script = script
    with pytest.raises(error, match=message):
        there()


async def wait_in_line(server: Any) -> None:
    server.pending, server.running = server.running, []


@pytest.mark.parametrize(
    ("script", "cancels", "asked"),
    [
        (hang, False, ["queue", "interrupt"]),
        (hang, True, ["cancel"]),  # since 0.26
        (wait_in_line, False, ["queue"]),
    ],
)
def test_timed_out_run_is_cancelled_by_its_id(
    comfy: Any, there: RunThere, script: Any, cancels: bool, asked: list[str]
) -> None:
    comfy.script, comfy.cancels = script, cancels
    with pytest.raises(RunFailedError, match=r"did not finish in time and was interrupted \(2 s\)"):
        there(timeout=TIME)
    bodies = {"interrupt": {"prompt_id": comfy.prompt_id}, "queue": {"delete": [comfy.prompt_id]}}
    assert comfy.requests[1:] == [(kind, bodies.get(kind, comfy.prompt_id)) for kind in asked]


def test_interrupt_that_server_does_not_accept_is_reported(
    comfy: Any, there: RunThere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def silent_while_running(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/ws" and comfy.running:
            await asyncio.sleep(HANG_SECONDS)
        return await handler(request)

    monkeypatch.setattr(follow, "CANCEL_SECONDS", 0.1)
    comfy.script, comfy.around = hang, silent_while_running
    with pytest.raises(RunFailedError, match=r"did not finish in time \(2 s\)"):
        there(timeout=TIME)
    assert f"{comfy.url} did not accept the interrupt: the run may go on there" in caplog.text


def test_run_waits_in_queue_too_long_to_read(comfy: Any, there: RunThere, others: list[Any]) -> None:
    asked: list[str] = []

    async def wait_in_a_long_line(server: Any) -> None:
        server.pending, server.running = [*others, *server.running], others[:1]

    def finish_in_the_end(request: web.Request) -> None:
        asked.append(request.path)
        if asked.count("/queue") == 3:
            comfy.finish({"2": {}})

    comfy.script, comfy.first = wait_in_a_long_line, finish_in_the_end
    assert there(patience=0.0).outputs == {"2": {}}


def test_rejection_names_nodes_and_reasons(comfy: Any, there: RunThere) -> None:
    comfy.refuse = True
    comfy.node_errors = {"1": {"errors": [{"message": "Value too small", "details": "width"}]}}
    with pytest.raises(WorkflowError, match=r"node 1 \(Some Noise\): Value too small: width"):
        there()
    comfy.first = lambda request: web.Response(status=400, text="too hot") if request.path == "/prompt" else None
    with pytest.raises(WorkflowError, match="too hot"):
        there()


def test_rejection_of_one_output_interrupts_the_others(comfy: Any, there: RunThere) -> None:
    comfy.node_errors = {"2": {"errors": [{"message": "Value not in list", "details": "model"}]}}
    comfy.script = hang
    with pytest.raises(WorkflowError, match=r"node 2 \(SaveImage\): Value not in list: model"):
        there()
    assert comfy.requests[-1][0] == "interrupt"


def test_unknown_node_types_are_named_and_nothing_is_sent(comfy: Any, there: RunThere) -> None:
    del comfy.object_info["Noise"]
    with pytest.raises(UnknownNodesError, match="has no node type Noise"):
        there()
    assert comfy.requests == []


def test_schemas_of_all_node_types_share_one_size_limit(
    comfy: Any, there: RunThere, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_off(request: web.Request, handler: Any) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"x" * 600)
        await asyncio.sleep(HANG_SECONDS)
        return answer

    monkeypatch.setattr(api, "ANSWER_BYTES", 1000)
    comfy.around = break_off
    with pytest.raises(HostError, match="answers with more than 1,000 bytes"):
        there(timeout=10)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "file:///x"])
def test_invalid_server_address_is_rejected(workflow: dict[str, Any], tmp_path: Path, url: str) -> None:
    with pytest.raises(WorkflowError, match="expected an address like"):
        run_on_server(workflow, url=url, output_dir=tmp_path)


def test_lost_server_ends_run(comfy: Any, there: RunThere) -> None:
    async def die(server: Any) -> None:
        await server._runner.sites.copy().pop().stop()
        for socket in list(server.sockets):
            await socket.close()
        await server._runner.cleanup()

    comfy.script = die
    with pytest.raises(RunFailedError, match="no longer answers"):
        there(patience=0.3)


@pytest.mark.parametrize("path", ["/queue", "/history/the-prompt"])
def test_server_that_refuses_one_endpoint_ends_run(comfy: Any, there: RunThere, path: str) -> None:
    """As behind a proxy that requires a login for it."""
    comfy.script, comfy.first = hang, lambda request: web.Response(status=403) if request.path == path else None
    with pytest.raises(RunFailedError, match=r"no longer answers.*HTTP 403"):
        there(patience=0.3, timeout=10)


def test_result_file_outside_output_folder_is_rejected(comfy: Any, there: RunThere, tmp_path: Path) -> None:
    async def evil(server: Any) -> None:
        server.files["x.png"] = b""
        server.finish({"2": {"images": [{"filename": "x.png", "subfolder": "../..", "type": "output"}]}})

    comfy.script = evil
    with pytest.raises(OutputError, match="outside the output folder"):
        there()
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["Bild ä (1) 100%.png", "絵.png", 'a"b.png'])
def test_uploaded_images_keep_their_names(comfy: Any, there: RunThere, tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / name)
    load = {"class_type": "LoadImage", "inputs": {"image": name}}
    there(workflow={"1": load}, input_dir=tmp_path / "in")
    assert dict(comfy.requests)["prompt"]["prompt"]["1"]["inputs"]["image"] == f"uploaded {name}"


def test_ui_format_is_converted_with_server_schemas(comfy: Any, there: RunThere) -> None:
    """Muted nodes need their schemas too: file names read their values."""
    muted = [{"id": 1, "type": "Noise", "mode": 2, "widgets_values": [48]}, {"id": 3, "type": "OfAPack", "mode": 2}]
    save = {"id": 2, "type": "SaveImage", "widgets_values": ["%Noise.width%_%OfAPack.width%"]}
    ui = {"nodes": [*muted, save], "links": []}
    there(workflow=ui)
    body, inputs = comfy.requests[0][1], {"filename_prefix": "48_%OfAPack.width%"}
    assert body["prompt"] == {"2": {"class_type": "SaveImage", "inputs": inputs}}
    assert body["extra_data"]["extra_pnginfo"]["workflow"] == ui


def test_run_with_unanswered_submission_is_cancelled(comfy: Any, there: RunThere) -> None:
    """The client finds it in the queue by its client id, since it never got the id of the prompt."""

    async def hang_before_the_answer(request: web.Request, handler: Any) -> web.StreamResponse:
        answer = await handler(request)
        while request.path == "/prompt" and "interrupt" not in dict(comfy.requests):
            await asyncio.sleep(0.01)
        return answer

    comfy.script = hang
    comfy.around = hang_before_the_answer
    comfy.running.append([0, "others", {}, {"client_id": "somebody"}, []])
    with pytest.raises(RunFailedError, match="did not accept the workflow in time"):
        there(timeout=TIME)
    assert comfy.requests[-1] == ("interrupt", {"prompt_id": comfy.prompt_id})


def test_timeout_does_not_stop_cancellation(comfy: Any, there: RunThere, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow_queue(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/queue":
            await asyncio.sleep(TIME)
        return await handler(request)

    monkeypatch.setattr(follow, "CANCEL_SECONDS", 60)
    comfy.script = hang
    comfy.around = slow_queue
    comfy.node_errors = {"2": {"errors": [{"message": "Value not in list", "details": "model"}]}}
    with pytest.raises(WorkflowError, match="Value not in list"):
        there(timeout=TIME)
    assert comfy.requests[-1] == ("interrupt", {"prompt_id": comfy.prompt_id})


def test_password_in_address_is_sent_but_not_shown(comfy: Any, there: RunThere, tmp_path: Path) -> None:
    seen: set[str] = set()

    def note(request: web.Request) -> None:
        seen.add(request.headers.get("Authorization", "none"))

    comfy.first = note
    login = "user:" + "%40".join(("se", "cret")) + "@"  # in pieces, since a traceback shows these lines
    address = comfy.url.replace("//", f"//{login}")
    there(url=address)
    assert seen == {"Basic " + base64.b64encode(b"user:se@cret").decode()}
    comfy.first = lambda request: web.Response(status=401)
    with pytest.raises(HostError) as refused:
        there(url=address)
    with pytest.raises(HostError) as unreachable:
        there(url=f"http://{login}127.0.0.1:9")
    with pytest.raises(WorkflowError) as wrong:
        there(url=f"ftp://{login}host")
    for error in (refused, unreachable, wrong):
        shown = "".join(traceback.format_exception(error.value))
        assert "cret" not in shown.replace('se%40cret@127.0.0.1:9")', "") and "user:" not in str(error.value)


def test_exception_in_progress_callback_ends_run(comfy: Any, there: RunThere) -> None:
    class Enough(Exception): ...

    def stop(progress: RunProgress) -> None:
        raise Enough

    comfy.script = hang
    with pytest.raises(Enough):
        there(on_progress=stop)
    assert comfy.requests[-1][0] == "interrupt"


@pytest.mark.parametrize("wrong", [{"plan": 5}, {"steps": 5}, {"steps": [{"seconds": "x"}]}, {"before": [1]}])
def test_malformed_stage_report_is_rejected(comfy: Any, there: RunThere, wrong: dict[str, Any]) -> None:
    step = {"seconds": 1.0, "stage": "denoiser", "outcome": "ok"}
    report = {"plan": {"component": "denoiser", "dtype": "fp16", "guarded": True}, "steps": [step]}

    async def send_report(server: Any) -> None:
        server.finish({"2": {"onediff_guard": [report, {**report, **wrong}, 5], "text": ["fine", 5]}, "3": {"text": 5}})

    comfy.script = send_report
    result = there()
    assert result.summaries() == ["fine"]
    with pytest.raises(RunFailedError, match="report of a stage has an unknown format"):
        result.stages()


# --- result files: complete and under free names, or absent ----------------------------------------------------------


def test_existing_file_is_not_overwritten(comfy: Any, there: RunThere, tmp_path: Path) -> None:
    mine = tmp_path / "out" / "sub" / "a_00001_.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    assert [path.name for path in there().files] == ["a_00002_.png"]
    assert mine.read_bytes() == b"mine"


def test_failed_download_is_reported(comfy: Any, there: RunThere) -> None:
    comfy.files.clear()
    with pytest.raises(RunFailedError, match=r"refuses to send its result sub/a_00001_\.png: HTTP 404"):
        there()


def test_failed_download_is_tried_3_times(comfy: Any, there: RunThere, tmp_path: Path) -> None:
    tries: list[str] = []

    def answer(request: web.Request) -> web.StreamResponse | None:
        if request.path == "/view":
            tries.append(request.path)
        return web.Response(status=502) if request.path == "/view" and len(tries) < 3 else None

    comfy.first = answer
    assert there().files[0].read_bytes() == b"picture"
    assert len(tries) == 3
    comfy.files["a_00001_.png"] = b"another"
    comfy.first = lambda request: web.Response(status=503) if request.path == "/view" else None
    with pytest.raises(
        RunFailedError, match=r"did not send its result sub/a_00001_\.png completely in 3 tries \(0 bytes; HTTP 503"
    ):
        there()
    assert [path.name for path in (tmp_path / "out" / "sub").iterdir()] == ["a_00001_.png"]


def test_stalled_download_is_given_up(comfy: Any, there: RunThere, monkeypatch: pytest.MonkeyPatch) -> None:
    async def drip(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/view":
            return await handler(request)
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x")
            await asyncio.sleep(0.02)

    monkeypatch.setattr(api, "STALL_SECONDS", 1.0)
    comfy.around = drip
    with pytest.raises(RunFailedError, match=r"did not send its result .* in 3 tries \(.*; \d+ bytes in 1 s\)"):
        there(timeout=20)


@pytest.mark.parametrize(
    ("constant", "value", "error", "message"),
    [
        ("MAX_FILE_BYTES", 6, RunFailedError, "sends more than 6 bytes"),
        ("FREE_BYTES", 2**80, OutputError, "does not fit the disk"),
    ],
)
def test_file_that_is_too_large_is_rejected(
    comfy: Any,
    there: RunThere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    constant: str,
    value: int,
    error: type[HeadlessError],
    message: str,
) -> None:
    monkeypatch.setattr(api, constant, value)
    with pytest.raises(error, match=message):
        there()
    assert list((tmp_path / "out" / "sub").iterdir()) == []
