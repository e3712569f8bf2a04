"""`--gpus N`: a run over processes, here on the CPU. Files are one process's, and what ends one ends the run."""

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
from as_comfyui import as_json
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
    """CogVideoX from a prompt to PNG files, beside its model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "models").mkdir()
    (folder / "models" / "small").symlink_to(model_folder("2b"))
    prompts = {"positive": ["encode", 0], "negative": ["encode", 1]}
    size = {"width": 96, "height": 64, "frames": 9, "steps": 2}
    nodes = {
        "load": as_json("LoadPipeline", model="small", precision="fp32", backend="eager"),
        "encode": as_json("EncodePrompt", pipeline=["load", 0], prompt="a red kite"),
        "sample": as_json("SampleCogVideoX", pipeline=["load", 0], **prompts, **size, scheduler="DDIM"),
        "decode": as_json("DecodeLatents", pipeline=["load", 0], latents=["sample", 0], tiling=False),
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "kite"}},
    }
    (folder / "workflow.json").write_text(json.dumps(nodes))
    return folder


def pictures(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.glob("kite_*.png"))]).astype(int)


@pytest.fixture
def there(workflow: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workflow)
    return workflow


def test_its_files_are_those_of_one_process(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "workflow.json", "--json", "--out", str(tmp_path / "one")]) == 0
    told, lines = capsys.readouterr()
    one = json.loads(told)
    stages = [line for line in lines.splitlines() if not line.startswith("node ")]
    assert "\r" not in lines and stages[-3:] == ["encoding prompt 2 of 2", "step 2/2 · fp32", "decoding part 1 of 1"]
    assert cli.main(["run", "workflow.json", "--json", "--out", str(tmp_path / "two"), "--gpus", "2"]) == 0
    told, lines = capsys.readouterr()
    two = json.loads(told)
    assert [Path(file).name for file in two["files"]] == [Path(file).name for file in one["files"]]
    assert len(list((tmp_path / "two").iterdir())) == len(two["files"]) == 9
    assert abs(pictures(tmp_path / "one") - pictures(tmp_path / "two")).max() <= 1
    assert two["outputs"].keys() == one["outputs"].keys()
    report = two["outputs"]["sample"]["onediff_guard"][0]
    shared = "each half of guidance is computed by a GPU, at the same time as the other"
    assert shared in report["notes"] and len(report["steps"]) == 2
    told = [line.split()[1] for line in lines.splitlines() if line.startswith("node")]
    assert told == ["load", "encode", "sample", "decode", "save"]


def test_precisions_are_compared_over_ranks(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--precisions", "bf16", "--json", "--out", str(tmp_path / "out"), "--gpus", "2"]
    assert cli.main(["compare", "workflow.json", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    found = [(run["precision"], run["steps"], run["finite_frames"]) for run in told["runs"]]
    assert found == [("fp32", 2, 9), ("bf16", 2, 9)]
    assert told["errors_from"].startswith("8-bit") and told["runs"][1]["psnr_db"] > 20
    for run in told["runs"]:
        notes = [note for stage in run["stages"] for note in stage["notes"]]
        assert any("each half of guidance is computed by a GPU" in note for note in notes)


def test_an_error_of_the_workflow_is_the_same(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for options in ([], ["--gpus", "2"]):
        assert cli.main(["run", "workflow.json", "--set", "sample.steps=0", *options]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and "steps" in told[0]


@pytest.fixture
def running(
    workflow: Path, tmp_path: Path
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[psutil.Process]]]]:
    """Starts a run that would take minutes, over two ranks. Returns it and its ranks once they compute."""
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


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and the last line that it said."""
    code = run.wait(HANG_SECONDS)
    assert run.stderr
    return code, (run.stderr.read().strip().splitlines() or [""])[-1]


def none_is_left(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, HANG_SECONDS)
    return not alive


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_and_is_named(
    killed: int, running: Callable[..., Any], tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    run, processes = running()
    assert len(processes) == 2
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            assert connection.laddr.ip == "127.0.0.1"
    processes[killed].kill()
    began = time.monotonic()
    code, said = ended(run)
    seconds = time.monotonic() - began
    figure(f"rank {killed} of 2 killed: seconds until the run ended with its name", f"{seconds:.1f}")
    assert code == 4 and f"Rank {killed} of 2 (on the CPU) was killed by SIGKILL" in said
    assert none_is_left(processes) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_no_rank_outlives_the_command(
    number: signal.Signals, code: int, running: Callable[..., Any], tmp_path: Path
) -> None:
    run, processes = running()
    os.kill(run.pid, number)
    found, said = ended(run)
    assert found == code and (code < 0 or "Interrupted" in said)
    assert none_is_left(processes) and not list(tmp_path.iterdir())


def test_a_timeout_ends_it(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "2", "--timeout", "1", "--out", str(tmp_path)]
    assert cli.main(["run", "workflow.json", *options]) == 4
    assert "was not done after 1 s" in capsys.readouterr().err
    assert not [each for each in psutil.Process().children() if "spawn_main" in " ".join(each.cmdline())]
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_stopped_ends_the_run_and_is_named(running: Callable[..., Any]) -> None:
    run, processes = running()
    processes[1].suspend()
    code, said = ended(run)
    assert code == 4 and "Rank 1 of 2 (on the CPU) gave no sign of life for 60 s" in said and none_is_left(processes)


def test_a_rank_is_slow_as_long_as_it_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BEAT", 0.1)
    monkeypatch.setattr(ranks, "SILENT", 1.0)
    slow, stopped = rank("slow", None), rank("stopped", None)
    slow.channel, there = multiprocessing.Pipe()
    stopped.channel, nowhere = multiprocessing.Pipe()
    over = threading.Event()

    def tell(message: Any) -> None:
        if over.is_set():
            raise SystemExit
        there.send(message)

    def beat() -> None:
        with suppress(SystemExit):
            ranks._beat(tell)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(RunFailedError, match="not done after 3 s"):
            ranks._watch([slow], 3.0, no_progress)
        with pytest.raises(RunFailedError, match="stopped gave no sign of life for 1 s"):
            ranks._watch([slow, stopped], None, no_progress)
    finally:
        over.set()
        beating.join()
    nowhere.close()


@pytest.mark.parametrize("host", [["--server", "127.0.0.1:9"], ["--comfyui", "."]])
def test_not_in_comfyuis_process(there: Path, host: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "workflow.json", "--gpus", "2", *host]) == 2
    assert "none may be ComfyUI's" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "65", "²"])
def test_what_is_no_number_of_gpus(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected 'auto'"):
        chosen._gpus(text)


@pytest.mark.parametrize(
    ("asked", "have", "number"),
    [("auto", 0, 1), ("auto", 1, 1), ("auto", 8, 8), ("1", 0, 1), ("4", 8, 4), ("2", 0, 2), ("4", 2, None)],
)
def test_how_many(asked: str, have: int, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "gpus_here", lambda: have)
    refused = pytest.raises(WorkflowError, match=f"--gpus is {asked}, but PyTorch sees {have} GPUs here")
    with refused if number is None else nullcontext():
        assert ranks.chosen_number(asked) == number


def test_only_the_first_does_what_is_not_computed_together(workflow: Path) -> None:
    classes = local.default_classes()
    nodes = json.loads((workflow / "workflow.json").read_text())
    assert local._together(plan(from_api(nodes), classes), classes) == ["load", "encode", "sample"]
    nodes["decode"]["inputs"]["chunk"] = 0
    assert local._together(plan(from_api(nodes), classes), classes) == ["load", "encode", "sample"]
    nodes["decode"]["inputs"]["chunk"] = 8  # chunks of frames are shared out
    assert local._together(plan(from_api(nodes), classes), classes) == ["load", "encode", "sample", "decode"]


def rank(name: str, code: int | None, failed_at: float | None = None) -> ranks._Rank:
    failed = None if failed_at is None else ranks._Failed(RunFailedError, "closed", failed_at)
    process: Any = SimpleNamespace(exitcode=code)
    return ranks._Rank(name, process, None, failed=failed)


@pytest.mark.parametrize(
    ("first", "second", "to_blame"),
    [
        ((1, 5.0), (-9, None), "second"),  # what was killed comes before what failed,
        ((1, 5.0), (1, 4.0), "second"),  # and what failed first before what failed later, since that waited for it
        ((None, None), (1, 5.0), "second"),
        ((1, 4.0), (1, 5.0), "first"),
    ],
)
def test_who_is_to_blame(first: tuple[Any, Any], second: tuple[Any, Any], to_blame: str) -> None:
    assert ranks._to_blame([rank("first", *first), rank("second", *second)]).name == to_blame


@pytest.mark.parametrize(
    ("code", "says", "memory"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL", True),
        (-signal.SIGSEGV, "was killed by SIGSEGV", False),
        (1, "ended with exit code 1", False),
    ],
)
def test_main_memory_is_blamed_for_the_systems_kill_alone(code: int, says: str, memory: bool) -> None:
    told = str(rank("Rank 1 of 2", int(code)).error())
    assert says in told and ("main memory ran out" in told) is memory
