"""`--gpus N`: a run over several ranks, here on the CPU: results as of one process, and a failed rank ends the run."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from as_comfyui import api_node
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.errors import RunFailedError, WorkflowError
from comfyui_onediff_guard.headless.hosts import chosen, local, ranks
from comfyui_onediff_guard.headless.hosts.result import no_progress
from comfyui_onediff_guard.headless.workflow.graph import from_api
from comfyui_onediff_guard.headless.workflow.validate import plan
from PIL import Image
from waiting import HANG_SECONDS


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[..., Path]) -> Path:
    """A folder with a model and a workflow of CogVideoX that writes PNG files."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "models").mkdir()
    (folder / "models" / "small").symlink_to(model_folder("2b"))
    prompts = {"positive": ["encode", 0], "negative": ["encode", 1]}
    size = {"width": 96, "height": 64, "frames": 9, "steps": 2}
    nodes = {
        "load": api_node("LoadPipeline", model="small", precision="fp32", backend="eager"),
        "encode": api_node("EncodePrompt", pipeline=["load", 0], prompt="a red kite"),
        "sample": api_node("SampleCogVideoX", pipeline=["load", 0], **prompts, **size, scheduler="DDIM"),
        "decode": api_node("DecodeLatents", pipeline=["load", 0], latents=["sample", 0], tiling=False),
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "kite"}},
    }
    (folder / "workflow.json").write_text(json.dumps(nodes))
    return folder


def pictures(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.glob("kite_*.png"))]).astype(int)


@pytest.fixture
def cwd(workflow: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workflow)
    return workflow


def test_two_ranks_match_one_process_within_1_of_255(
    cwd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "workflow.json", "--json", "--out", str(tmp_path / "one")]) == 0
    out, lines = capsys.readouterr()
    one = json.loads(out)
    stages = [line for line in lines.splitlines() if not line.startswith("node ")]
    assert "\r" not in lines and stages[-3:] == ["encoding prompt 2 of 2", "step 2/2 · fp32", "decoding part 1 of 1"]
    assert cli.main(["run", "workflow.json", "--json", "--out", str(tmp_path / "two"), "--gpus", "2"]) == 0
    out, lines = capsys.readouterr()
    two = json.loads(out)
    assert [Path(file).name for file in two["files"]] == [Path(file).name for file in one["files"]]
    assert len(list((tmp_path / "two").iterdir())) == len(two["files"]) == 9
    assert abs(pictures(tmp_path / "one") - pictures(tmp_path / "two")).max() <= 1
    assert two["outputs"].keys() == one["outputs"].keys()
    report = two["outputs"]["sample"]["onediff_guard"][0]
    shared = "each half of guidance is computed by a GPU, at the same time as the other"
    assert shared in report["notes"] and len(report["steps"]) == 2
    nodes = [line.split()[1] for line in lines.splitlines() if line.startswith("node")]
    assert nodes == ["load", "encode", "sample", "decode", "save"]


def test_compare_runs_over_two_ranks(cwd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--precisions", "bf16", "--json", "--out", str(tmp_path / "out"), "--gpus", "2"]
    assert cli.main(["compare", "workflow.json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = [(run["precision"], run["steps"], run["finite_frames"]) for run in answer["runs"]]
    assert found == [("fp32", 2, 9), ("bf16", 2, 9)]
    assert answer["errors_from"].startswith("8-bit") and answer["runs"][1]["psnr_db"] > 20
    for run in answer["runs"]:
        notes = [note for stage in run["stages"] for note in stage["notes"]]
        assert any("each half of guidance is computed by a GPU" in note for note in notes)


def test_workflow_error_is_same_with_and_without_ranks(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = []
    for options in ([], ["--gpus", "2"]):
        assert cli.main(["run", "workflow.json", "--set", "sample.steps=0", *options]) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1] and "steps" in errors[0]


@pytest.fixture
def running(
    workflow: Path, tmp_path: Path
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[psutil.Process]]]]:
    """Start a run of minutes over two ranks; return its process and its ranks once they compute."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        command = [sys.executable, "-m", "comfyui_onediff_guard", "run", "workflow.json", "--gpus", "2", "--out",
                   str(tmp_path), "--set", "sample.steps=1000", *options]  # fmt: skip
        run = subprocess.Popen(command, cwd=workflow, stderr=subprocess.PIPE, text=True)
        started.append(run)
        assert run.stderr
        for line in run.stderr:
            if "Sample" in line:
                break
        found = [each for each in psutil.Process(run.pid).children() if "spawn_main" in " ".join(each.cmdline())]
        return run, sorted(found, key=lambda process: process.pid)

    yield start
    for run in started:
        run.kill()
        run.wait()
        assert run.stderr
        run.stderr.close()


def wait_for_end(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a run; return its exit code and its last line on stderr."""
    code = run.wait(HANG_SECONDS)
    assert run.stderr
    return code, (run.stderr.read().strip().splitlines() or [""])[-1]


def all_ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, HANG_SECONDS)
    return not alive


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_ends_run_and_is_named(
    killed: int, running: Callable[..., Any], tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    run, processes = running()
    assert len(processes) == 2
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            assert connection.laddr.ip == "127.0.0.1"
    processes[killed].kill()
    began = time.monotonic()
    code, line = wait_for_end(run)
    seconds = time.monotonic() - began
    figure(f"rank {killed} of 2 killed: seconds until the run ended with its name", f"{seconds:.1f}")
    assert code == 4 and f"Rank {killed} of 2 (on the CPU) was killed by SIGKILL" in line
    assert all_ended(processes) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_no_rank_outlives_command(
    number: signal.Signals, code: int, running: Callable[..., Any], tmp_path: Path
) -> None:
    run, processes = running()
    os.kill(run.pid, number)
    found, line = wait_for_end(run)
    assert found == code and (code < 0 or "Interrupted" in line)
    assert all_ended(processes) and not list(tmp_path.iterdir())


def test_timeout_ends_run_and_ranks(cwd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "2", "--timeout", "1", "--out", str(tmp_path)]
    assert cli.main(["run", "workflow.json", *options]) == 4
    assert "did not finish within 1 s" in capsys.readouterr().err
    assert not [each for each in psutil.Process().children() if "spawn_main" in " ".join(each.cmdline())]
    assert not list(tmp_path.iterdir())


def test_suspended_rank_ends_run_and_is_named(running: Callable[..., Any]) -> None:
    run, processes = running()
    processes[1].suspend()
    code, line = wait_for_end(run)
    assert code == 4 and "Rank 1 of 2 (on the CPU) did not respond for 60 s" in line and all_ended(processes)


def test_slow_rank_with_heartbeat_is_not_reported_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BEAT", 0.1)
    monkeypatch.setattr(ranks, "SILENT", 1.0)
    slow, stopped = rank("slow", None), rank("stopped", None)
    slow.channel, sender = multiprocessing.Pipe()
    stopped.channel, silent = multiprocessing.Pipe()
    over = threading.Event()

    def send(message: Any) -> None:
        if over.is_set():
            raise SystemExit
        sender.send(message)

    def beat() -> None:
        with suppress(SystemExit):
            ranks._beat(send)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(RunFailedError, match="did not finish within 3 s"):
            ranks._watch([slow], 3.0, no_progress)
        with pytest.raises(RunFailedError, match="stopped did not respond for 1 s"):
            ranks._watch([slow, stopped], None, no_progress)
    finally:
        over.set()
        beating.join()
    silent.close()


@pytest.mark.parametrize("host", [["--server", "127.0.0.1:9"], ["--comfyui", "."]])
def test_gpus_option_needs_local_host(cwd: Path, host: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "workflow.json", "--gpus", "2", *host]) == 2
    assert "one process of its own per GPU" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "65", "²"])
def test_invalid_gpu_count_is_rejected(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected 'auto'"):
        chosen._gpus(text)


@pytest.mark.parametrize(
    ("asked", "available", "expected"),
    [("auto", 0, 1), ("auto", 1, 1), ("auto", 8, 8), ("1", 0, 1), ("4", 8, 4), ("2", 0, 2), ("4", 2, None)],
)
def test_gpu_count_is_resolved_or_rejected(
    asked: str, available: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "gpus_here", lambda: available)
    refused = pytest.raises(WorkflowError, match=f"--gpus is {asked}, but PyTorch sees {available} GPUs here")
    with refused if expected is None else nullcontext():
        assert ranks.chosen_number(asked) == expected


def test_only_shared_nodes_run_on_all_ranks(workflow: Path) -> None:
    classes = local.default_classes()
    nodes = json.loads((workflow / "workflow.json").read_text())
    assert local._together(plan(from_api(nodes), classes), classes) == ["load", "encode", "sample"]
    nodes["decode"]["inputs"]["chunk"] = 0
    assert local._together(plan(from_api(nodes), classes), classes) == ["load", "encode", "sample"]
    nodes["decode"]["inputs"]["chunk"] = 8  # ranks share chunks of frames
    assert local._together(plan(from_api(nodes), classes), classes) == ["load", "encode", "sample", "decode"]


def rank(name: str, code: int | None, failed_at: float | None = None) -> ranks._Rank:
    failed = None if failed_at is None else ranks._Failed(RunFailedError, "closed", failed_at)
    process: Any = SimpleNamespace(exitcode=code)
    return ranks._Rank(name, process, None, failed=failed)


@pytest.mark.parametrize(
    ("first", "second", "to_blame"),
    [
        ((1, 5.0), (-9, None), "second"),  # a killed rank is blamed before a failed one,
        ((1, 5.0), (1, 4.0), "second"),  # and the first failure before a later one, which only waited for it
        ((None, None), (1, 5.0), "second"),
        ((1, 4.0), (1, 5.0), "first"),
    ],
)
def test_killed_or_first_failed_rank_is_blamed(first: tuple[Any, Any], second: tuple[Any, Any], to_blame: str) -> None:
    assert ranks._to_blame([rank("first", *first), rank("second", *second)]).name == to_blame


@pytest.mark.parametrize(
    ("code", "message", "memory"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL", True),
        (-signal.SIGSEGV, "was killed by SIGSEGV", False),
        (1, "ended with exit code 1", False),
    ],
)
def test_only_sigkill_is_blamed_on_main_memory(code: int, message: str, memory: bool) -> None:
    error = str(rank("Rank 1 of 2", int(code)).error())
    assert message in error and ("main memory probably ran out" in error) is memory
