"""A Ray that `batch` starts ends with it, also by SIGKILL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import toy_jobs
from batch_runs import Batch
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
