"""A Ray that `batch` starts ends with it, also by SIGKILL; and one that listens to its own machine alone is not waited
for."""

from __future__ import annotations

import os
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
from waiting import HANG_SECONDS, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray's processes are others"),
    pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install '.[scale]'"),
]


def test_no_process_of_ray_outlives_a_command_that_was_killed(toy_batch: Callable[..., Batch], tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = toy_batch([{"workflow": toy_jobs.workflow(seconds=600.0, log=str(log))}], "--workers", "1", log=log)
    process = run.start()
    wait_until(run.starts, "a job begins", meanwhile=process)
    left = psutil.Process(process.pid).children(recursive=True)
    assert {"gcs_server", "raylet"} <= {each.name() for each in left}
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(left, 20)
    assert not {"gcs_server", "raylet"} & {each.name() for each in alive}
    assert not psutil.pid_exists(run.starts()[0]["pid"]), "the worker, which may hold a GPU's memory"
    _, alive = psutil.wait_procs(alive, HANG_SECONDS)  # Ray's agents take a minute
    assert not alive


ALONE = """
import os, sys
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
import ray
ray.init(address="local", num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
"""


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
