"""200 jobs of 2 s over 4 workers, one killed after every 8 finished jobs, the command once. Minutes by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import toy_jobs
from batch_runs import Batch, Found

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its signals are POSIX's")
JOBS = 200


def test_two_hundred_jobs(
    toy_batch: Callable[..., Batch], tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    log = tmp_path / "log"
    lines = [
        {
            "workflow": toy_jobs.workflow(seconds=1.0, pause=1 / 3, log=str(log)),
            "matrix": {"seeds": {"count": JOBS}},
        }
    ]
    run = toy_batch(lines, "--workers", "4", "--attempts", "9", log=log)
    assert run.hurt(every=8, driver_at=100, jobs=JOBS) == 2
    assert run.finish()["code"] == 0
    found = Found.in_(run)
    assert found.seeds == list(range(JOBS)) and not found.broken and found.redone == 0
    figure("a batch of 200 jobs of 2 s, workers killed", len(run.killed))
    figure("the same: outputs that lack, are there twice, half-written, or were made again though whole", 0)
