"""Waiting for what no event tells of: files, logs and the ends of other processes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

HANG_SECONDS = 1500.0  # bounds what would hang, far from what anything takes
PAUSE_SECONDS = 0.05  # between two looks
CPU_SECONDS = 60  # bounds what takes a power of its input's size: what is linear takes less than one


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str], meanwhile: subprocess.Popen[Any] | None = None
) -> None:
    """Wait until the condition holds. what: it in words, for when it never does. meanwhile: what runs until then."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        ended = meanwhile is not None and meanwhile.poll() is not None and not condition()
        if ended or time.monotonic() > end:
            why = f"the process ended with {meanwhile.returncode}" if meanwhile and ended else f"{HANG_SECONDS:g} s"
            raise AssertionError(f"waited in vain ({why}): {what if isinstance(what, str) else what()}")
        time.sleep(PAUSE_SECONDS)


@contextmanager
def no_hang(what: str) -> Generator[None]:
    """Fail what does not end within `CPU_SECONDS` of this process's CPU. Not on Windows; in the main thread."""

    def stop(*_: object) -> None:
        pytest.fail(f"{what}: still busy after {CPU_SECONDS} s of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
