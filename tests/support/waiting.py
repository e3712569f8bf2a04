"""Wait for conditions without events: files, logs and the end of other processes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

HANG_SECONDS = 1500.0  # timeout for hanging code, far above any normal duration
PAUSE_SECONDS = 0.05  # between two checks
CPU_SECONDS = 60  # limit for code that is not linear in its input: linear code takes less than a second


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str], meanwhile: subprocess.Popen[Any] | None = None
) -> None:
    """Wait until the condition is true. what: its description for the error. meanwhile: a process that must not end."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        ended = meanwhile is not None and meanwhile.poll() is not None and not condition()
        if ended or time.monotonic() > end:
            why = f"the process ended with {meanwhile.returncode}" if meanwhile and ended else f"{HANG_SECONDS:g} s"
            raise AssertionError(f"waited in vain ({why}): {what if isinstance(what, str) else what()}")
        time.sleep(PAUSE_SECONDS)


@contextmanager
def no_hang(what: str) -> Generator[None]:
    """Fail if the body uses more than `CPU_SECONDS` of CPU. Main thread only, not on Windows."""

    def stop(*_: object) -> None:
        pytest.fail(f"{what}: still busy after {CPU_SECONDS} s of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
