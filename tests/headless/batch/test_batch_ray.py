"""A batch under a real Ray: workers and command killed, jobs that kill, and the command where there is no Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_jobs
from batch_runs import Batch, Found
from comfyui_onediff_guard.headless.batch import ray_pool
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its signals are POSIX's")

BatchOf = Callable[..., Batch]


def jobs(count: int, log: Path, **busy: Any) -> list[dict[str, Any]]:
    return [{"workflow": toy_jobs.workflow(log=str(log), **busy), "matrix": {"seeds": {"count": count}}}]


def test_workers_and_command_are_killed_and_every_output_is_there_once(toy_batch: BatchOf, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = toy_batch(jobs(16, log, seconds=0.3, pause=0.1), "--workers", "2", "--attempts", "9", log=log)
    assert run.hurt(every=4, driver_at=9, jobs=16) == 2
    answer = run.finish()
    assert answer["code"] == 0 and answer["already_done"] + answer["done"] == 16
    assert 0 < answer["done"] < 16, "the second command did the rest"
    found = Found.in_(run)
    assert found.seeds == list(range(16)) and not found.broken and found.redone == 0
    assert len(run.killed) >= 2
    again = toy_batch(jobs(16, log, seconds=0.3, pause=0.1), log=log)
    again.start()
    answer = again.finish()
    assert answer["already_done"] == 16 and answer["done"] == 0
    assert Found.in_(again).begun == found.begun


def test_a_job_that_kills_its_worker_is_parked_and_the_batch_goes_on(joined_batch: BatchOf, tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [
        {"workflow": toy_jobs.workflow(seed=1, fault="dies", log=str(log)), "name": "lethal"},
        {"workflow": toy_jobs.workflow(seed=2, fault="raises", log=str(log)), "name": "faulty"},
        {"workflow": toy_jobs.workflow(seed=3, log=str(log)), "name": "sound"},
    ]
    run = joined_batch(lines, "--workers", "1", "--attempts", "2", log=log)
    run.start()
    answer = run.finish()
    assert answer["code"] == 4 and answer["done"] == 1 and answer["failed"] == 2 and answer["workers_lost"] == 2
    errors = {fault["name"]: fault["error"] for fault in answer["faults"]}
    assert errors["lethal"].startswith("It ended its worker 2 times, at last so: ")
    assert "a toy's fault" in errors["faulty"]
    starts = [start["seed"] for start in run.starts()]
    assert starts.count(1) == 2 and starts.count(2) == 1 and starts.count(3) == 1
    assert len({start["pid"] for start in run.starts() if start["seed"] == 1}) == 2, "a fresh process each time"
    run.start()
    answer = run.finish()
    assert answer["code"] == 4 and answer["parked_before"] == 2 and len(run.starts()) == 4, "it is not tried again"


def test_ctrl_c_ends_all_and_the_same_command_goes_on(toy_batch: BatchOf, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = toy_batch(jobs(6, log, seconds=0.5), "--workers", "1", log=log)
    process = run.start()
    wait_until(lambda: len(run.whole()) >= 2, "two jobs are done", meanwhile=process)
    process.send_signal(signal.SIGINT)
    answer = run.finish()
    assert answer["code"] == 130 and answer["status"] == "error"
    assert "the same command goes on" in answer["told"]
    for start in run.starts():
        with pytest.raises(ProcessLookupError):
            os.kill(start["pid"], 0)
    done = len(run.whole())
    assert done < 6
    run.start()
    assert run.finish()["already_done"] == done
    found = Found.in_(run)
    assert found.seeds == list(range(6)) and found.redone == 0 and not found.broken


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="a small disk is made by root on Linux")
def test_a_full_disk_ends_it_and_the_same_command_goes_on(joined_batch: BatchOf, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    out.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(out)], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        run = joined_batch(jobs(20, log), "--workers", "1", log=log)
        run.start()
        answer = run.finish()
        assert answer["code"] == 5 and "the disk is full" in answer["error"]
        found = Found.in_(run)
        assert 0 < len(found.seeds) < 20 and not found.broken and not list((out / ".running").iterdir())
        assert not (out / "parked").exists(), "no job is at fault"
        subprocess.run(["mount", "-o", "remount,size=10m", str(out)], check=True)
        run.start()
        answer = run.finish()
        assert answer["code"] == 0 and answer["already_done"] == len(found.seeds)
        found = Found.in_(run)
        assert found.seeds == list(range(20)) and not found.broken and found.redone == 0
    finally:
        subprocess.run(["umount", "--lazy", str(out)], check=True)


@pytest.mark.parametrize("below", ["", "folder"])
def test_an_output_folder_that_is_a_file_is_told(toy_batch: BatchOf, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    run = toy_batch(jobs(1, tmp_path / "log"))
    run.out = tmp_path / "file" / below
    run.start()
    answer = run.finish()
    assert answer["code"] == 5 and "Not a directory" in answer["error"] and "--out" in answer["error"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_worker_that_lacks_the_models_says_so(joined_batch: BatchOf, tmp_path: Path) -> None:
    run = joined_batch(jobs(1, tmp_path / "log"), "--models", str(tmp_path / "nowhere"))
    run.start()
    answer = run.finish()
    assert answer["code"] == 3 and "models have to be there on every machine" in answer["error"]


@pytest.mark.parametrize(
    ("address", "code", "says"),
    [
        ("127.0.0.1:1", 3, "No Ray answers at 127.0.0.1:1"),
        ("127.0.0.1", 2, "expected HOST:PORT"),
        ("ray://127.0.0.1:10001", 2, "expected HOST:PORT"),
    ],
)
def test_no_ray_answers(toy_batch: BatchOf, tmp_path: Path, address: str, code: int, says: str) -> None:
    run = toy_batch(jobs(1, tmp_path / "log"), "--ray", address)
    run.start()
    answer = run.finish()
    assert answer["code"] == code and says in answer["error"]


def test_without_ray_the_command_says_what_to_install(
    console: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    file = toy_jobs.write_jobs(tmp_path / "jobs.jsonl", jobs(1, tmp_path / "log"))
    code, out, err = console("batch", file, "--out", tmp_path / "out", "--json")
    assert code == 2 and ray_pool.INSTALL in err and ray_pool.INSTALL in json.loads(out)["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [["--ray", "auto"], ["--models", "x"], ["--workers", "2"]])
def test_servers_have_their_own(
    console: Callable[..., tuple[int, str, str]], tmp_path: Path, option: list[str]
) -> None:
    code, _, err = console("batch", tmp_path / "none", "--server", "http://127.0.0.1:1", *option)
    assert code == 2 and f"{option[0]} has no meaning with --server" in err


@pytest.mark.parametrize("number", ["0", "-1", "x", "99999999"])
def test_a_number_of_workers_is_one(capsys: pytest.CaptureFixture[str], number: str, tmp_path: Path) -> None:
    from comfyui_onediff_guard.headless.commands import cli

    with pytest.raises(SystemExit):
        cli.main(["batch", str(tmp_path), "--workers", number])
    assert "expected a number from 1" in capsys.readouterr().err
