"""A Ray that `batch` starts ends with it, also by SIGKILL; and one that listens to its own machine alone is not waited
for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy_jobs
from batch_runs import TOYS, Batch
from comfyui_onediff_guard.headless.batch.crews import ray_keeper
from waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray's processes are others")
with_ray = pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install '.[scale]'")
SLEEPS = [sys.executable, "-c", "import time; time.sleep(3600)"]
OWNER = """
import os, subprocess, sys, time
from comfyui_onediff_guard.headless.batch.crews.ray_keeper import kept
with kept() as mark:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    child = subprocess.Popen([sys.executable, "-c", nested], start_new_session=True, env=os.environ | mark)
    print(child.pid, flush=True)
    sys.stdin.readline()
print("let go", flush=True)
time.sleep(3600)
"""


def is_keeper(process: psutil.Process) -> bool:
    return any(word.endswith("ray_keeper.py") for word in process.cmdline())


def keeper_of(pid: int) -> psutil.Process:
    (keeper,) = filter(is_keeper, psutil.Process(pid).children())
    return keeper


@pytest.mark.parametrize("let_go", [False, True])
def test_what_the_command_started_ends_with_it_however_it_ends(let_go: bool) -> None:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OWNER], **pipes) as owner:
        assert owner.stdin and owner.stdout
        child = psutil.Process(int(owner.stdout.readline()))
        wait_until(child.children, "it starts another")
        started, keeper = [child, *child.children()], keeper_of(owner.pid)
        if let_go:
            owner.stdin.write("\n")
            owner.stdin.flush()
            owner.stdout.readline()
        owner.kill()
    keeper.wait(HANG_SECONDS) if keeper.is_running() else None
    if let_go:
        assert all(each.is_running() for each in started), "they were let go"
        for each in started:
            each.kill()
    assert not psutil.wait_procs(started, HANG_SECONDS)[1]


def test_what_was_started_ends_where_the_command_is_gone_before_it_is_watched() -> None:
    started = subprocess.Popen(SLEEPS, env=os.environ | {ray_keeper.VARIABLE: "mark"})
    with subprocess.Popen([sys.executable, "-c", ""]) as owner:
        pass
    subprocess.run([sys.executable, "-I", ray_keeper.__file__, "mark", str(owner.pid)], input=b"", check=True)
    assert started.wait(HANG_SECONDS) == -signal.SIGKILL


def test_a_process_that_has_the_number_of_one_that_is_gone_is_not_watched() -> None:
    assert ray_keeper._owner(os.getppid()) == [psutil.Process(os.getppid())]
    with subprocess.Popen(SLEEPS) as another:
        watched = ray_keeper._owner(another.pid)
        another.kill()
    assert watched == ray_keeper._owner(another.pid) == []


@with_ray
def test_no_process_of_ray_outlives_a_command_that_was_killed(toy_batch: Callable[..., Batch], tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = toy_batch([{"workflow": toy_jobs.workflow(seconds=600.0, log=str(log))}], "--workers", "1", log=log)
    process = run.start()
    wait_until(run.starts, "a job begins", meanwhile=process)
    left = psutil.Process(process.pid).children(recursive=True)
    assert {"gcs_server", "raylet"} <= {each.name() for each in left}
    keeper = keeper_of(process.pid)
    process.kill()
    process.communicate()
    keeper.wait(HANG_SECONDS) if keeper.is_running() else None
    _, alive = psutil.wait_procs([each for each in left if each != keeper], 20)  # Ray itself takes a minute
    assert not alive


ALONE = """
import os, sys
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
import ray
ray.init(address="local", num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
"""


@with_ray
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_ray_that_is_its_own_machines_alone_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    file = toy_jobs.write_jobs(tmp_path / "jobs.jsonl", [{"workflow": toy_jobs.workflow()}])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ALONE], **pipes) as alone:
        assert alone.stdin and alone.stdout
        port = alone.stdout.readline().strip().rpartition(":")[2]
        variables = os.environ | {"PYTHONPATH": str(Path(toy_jobs.__file__).parent)}
        command = [sys.executable, "-c", TOYS, "batch", str(file), "--out", str(tmp_path), "--ray", f"{host}:{port}"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, env=variables)
        assert told.returncode == 3 and "this machine's own address" in told.stderr
        alone.stdin.write("\n")
        alone.stdin.close()
