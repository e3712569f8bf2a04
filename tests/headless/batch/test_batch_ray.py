"""A batch under a real Ray: killed workers, jobs that kill workers, full disks, access to Ray; and without Ray."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy_jobs
from batch_runs import Batch, OutputCheck, without_ray_auth
from comfyui_onediff_guard.headless.batch import ray_pool
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.errors import HostError
from waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Ray has other processes elsewhere")

BatchOf = Callable[..., Batch]


def jobs(count: int, log: Path, **busy: Any) -> list[dict[str, Any]]:
    return [{"workflow": toy_jobs.workflow(log=str(log), **busy), "matrix": {"seeds": {"count": count}}}]


def test_killed_workers_and_command_lose_or_repeat_no_output(toy_batch: BatchOf, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = toy_batch(jobs(16, log, seconds=0.3, pause=0.1), "--workers", "2", "--attempts", "9", log=log)
    assert run.run_with_kills(every=4, driver_at=9, jobs=16) == 2
    answer = run.finish()
    assert answer["code"] == 0 and answer["already_done"] + answer["done"] == 16
    assert 0 < answer["done"] < 16, "the second command did the rest"
    found = OutputCheck.of(run)
    assert found.seeds == list(range(16)) and not found.broken and found.redone == 0
    assert len(run.killed) >= 2
    again = toy_batch(jobs(16, log, seconds=0.3, pause=0.1), log=log)
    answer = again.run()
    assert answer["already_done"] == 16 and answer["done"] == 0
    assert OutputCheck.of(again).begun == found.begun


def test_job_that_kills_its_worker_is_parked_and_batch_continues(joined_batch: BatchOf, tmp_path: Path) -> None:
    log = tmp_path / "log"
    faults = {"lethal": "dies", "faulty": "raises", "sound": "none"}
    lines = [
        {"workflow": toy_jobs.workflow(seed=seed, fault=fault, log=str(log)), "name": name}
        for seed, (name, fault) in enumerate(faults.items(), 1)
    ]
    run = joined_batch(lines, "--workers", "1", "--attempts", "2", log=log)
    answer = run.run()
    assert answer["code"] == 4 and answer["done"] == 1 and answer["failed"] == 2 and answer["workers_lost"] == 2
    errors = {fault["name"]: fault["error"] for fault in answer["faults"]}
    assert errors["lethal"].startswith("Its worker died 2 times, the last time with: ")
    assert "a toy's fault" in errors["faulty"]
    assert sorted(start["seed"] for start in run.starts()) == [1, 1, 2, 3]
    assert len({start["pid"] for start in run.starts() if start["seed"] == 1}) == 2, "a fresh process each time"
    answer = run.run()
    assert answer["code"] == 4 and answer["parked_before"] == 2 and len(run.starts()) == 4, "it is not retried"


def test_ctrl_c_ends_workers_and_same_command_resumes(toy_batch: BatchOf, tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    gate.write_text("2")
    run = toy_batch(jobs(6, log, gate=str(gate)), "--workers", "1", log=log)
    process = run.start()
    wait_until(lambda: len(run.starts()) == 3, "two jobs are done", meanwhile=process)
    process.send_signal(signal.SIGINT)
    answer = run.finish()
    assert answer["code"] == 130 and answer["status"] == "error"
    assert "run the same command" in answer["told"]
    assert not any(psutil.pid_exists(start["pid"]) for start in run.starts())
    assert len(run.whole()) == 2
    gate.write_text("6")
    assert run.run()["already_done"] == 2
    found = OutputCheck.of(run)
    assert found.seeds == list(range(6)) and found.redone == 0 and not found.broken


def test_sigterm_while_ray_starts_is_an_interruption(toy_batch: BatchOf, tmp_path: Path) -> None:
    run = toy_batch(jobs(1, tmp_path / "log"))
    process = run.start()
    wait_until(psutil.Process(process.pid).children, "Ray starts its processes", meanwhile=process)
    process.terminate()
    answer = run.finish()
    assert answer["code"] == 130 and "run the same command to continue" in answer["told"] and not run.starts()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux can mount a small disk")
def test_full_disk_ends_batch_and_same_command_resumes(joined_batch: BatchOf, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    out.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(out)], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        run = joined_batch(jobs(20, log), "--workers", "1", log=log)
        answer = run.run()
        assert answer["code"] == 5 and "the disk is full" in answer["error"]
        found = OutputCheck.of(run)
        assert 0 < len(found.seeds) < 20 and not found.broken and not list((out / ".running").iterdir())
        assert not (out / "parked").exists(), "no job is at fault"
        subprocess.run(["mount", "-o", "remount,size=10m", str(out)], check=True)
        answer = run.run()
        assert answer["code"] == 0 and answer["already_done"] == len(found.seeds)
        found = OutputCheck.of(run)
        assert found.seeds == list(range(20)) and not found.broken and found.redone == 0
    finally:
        subprocess.run(["umount", "--lazy", str(out)], check=True)


def is_loopback(address: str) -> bool:
    ip = ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


@on_linux
def test_own_ray_is_local_requires_token_and_ends_with_command(toy_batch: BatchOf, tmp_path: Path) -> None:
    """It ends even if the command is killed."""
    log = tmp_path / "log"
    run = toy_batch(jobs(1, log, seconds=900.0), "--workers", "1", log=log)
    run.environment = without_ray_auth(run.environment, tmp_path / "home")
    process = run.start()
    wait_until(run.starts, "a job begins", meanwhile=process)
    command = psutil.Process(process.pid)
    processes = [command, *command.children(recursive=True)]
    names = {each: each.name() for each in processes}
    connections = [(names[one], each) for one in processes for each in one.net_connections("tcp")]
    listening = {(name, each.laddr.ip) for name, each in connections if each.status == psutil.CONN_LISTEN}
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert all(is_loopback(address) for _, address in listening), listening
    words = [word for each in processes for word in each.cmdline()]
    (address,) = {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    intruder = toy_batch(jobs(1, log), "--ray", address)
    intruder.environment = run.environment | ray_pool.LOOPBACK | {"RAY_AUTH_TOKEN": "a" * 64}
    answer = intruder.run()
    assert answer["code"] == 3 and "token" in answer["error"]
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(processes, 20)
    assert not {"gcs_server", "raylet"} & {names[each] for each in alive}
    assert not psutil.pid_exists(run.starts()[0]["pid"]), "the worker, which may hold a GPU's memory"
    _, alive = psutil.wait_procs(alive, HANG_SECONDS)  # Ray's agents take a minute
    assert not alive


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file modes")
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640, 0o666])
@pytest.mark.parametrize(
    "foreign", ["", "auth_token", "."], ids=["own file", "other user's file", "other user's folder"]
)
def test_token_file_is_made_private_or_rejected_if_owned_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, foreign: str
) -> None:
    if foreign and os.geteuid():
        pytest.skip("only root can give files away")
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("a" * 32)
    file.parent.chmod(0o777)
    file.chmod(mode)
    if foreign:
        os.chown(file.parent / foreign, 65534, 65534)
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", own | {"RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_MODE": "token"})
    with (
        pytest.raises(HostError, match="another user" if foreign else "No Ray answers"),
        ray_pool.connected("127.0.0.1:1"),
    ):
        pass
    if not foreign:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and not file.parent.stat().st_mode & 0o022


@pytest.mark.parametrize(
    ("options", "code", "messages"),
    [
        (["--ray", "127.0.0.1:1"], 3, ["No Ray answers at 127.0.0.1:1"]),
        (["--ray", "127.0.0.1"], 2, ["expected HOST:PORT"]),
        (["--ray", "ray://127.0.0.1:10001"], 2, ["expected HOST:PORT"]),
        (["--out", "file"], 5, ["Not a directory", "--out"]),
        (["--out", "file/folder"], 5, ["Not a directory", "--out"]),
        (["--models", "nowhere"], 3, ["every machine must have the models"]),
    ],
)
def test_batch_that_cannot_start_reports_reason(
    joined_batch: BatchOf, tmp_path: Path, options: list[str], code: int, messages: list[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    answer = joined_batch(jobs(1, tmp_path / "log"), *options).run()
    assert answer["code"] == code and all(text in answer["error"] for text in messages)
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_ray_reports_install_command(
    console: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if Ray were not installed
    file = toy_jobs.write_jobs(tmp_path / "jobs.jsonl", jobs(1, tmp_path / "log"))
    code, out, err = console("batch", file, "--out", tmp_path / "out", "--json")
    assert code == 2 and ray_pool.INSTALL in err and ray_pool.INSTALL in json.loads(out)["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray", "auto", "--server", "http://127.0.0.1:1"], "--ray does not work with --server"),
        (["--models", "x", "--server", "http://127.0.0.1:1"], "--models does not work with --server"),
        (["--workers", "2", "--server", "http://127.0.0.1:1"], "--workers does not work with --server"),
        (["--guard"], "--guard works only with --server"),  # pipelines are always guarded
    ],
)
def test_options_that_do_not_fit_server_mode_are_rejected(
    console: Callable[..., tuple[int, str, str]], tmp_path: Path, options: list[str], message: str
) -> None:
    code, _, err = console("batch", tmp_path / "none", *options)
    assert code == 2 and message in err


@pytest.mark.parametrize("number", ["0", "-1", "x", "99999999"])
def test_invalid_worker_count_is_rejected(capsys: pytest.CaptureFixture[str], number: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cli.main(["batch", str(tmp_path), "--workers", number])
    assert "expected a number from 1" in capsys.readouterr().err
