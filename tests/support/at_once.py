"""Run jobs in threads that start at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from waiting import HANG_SECONDS


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """The result of each job, run in its own thread; all start together."""
    begin = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        begin.wait(HANG_SECONDS)
        with torch.inference_mode():
            return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return [each.result(HANG_SECONDS) for each in [threads.submit(run, job) for job in jobs]]
