"""Waiting for what no event tells of: files, logs and the ends of other processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

HANG_SECONDS = 1500.0  # bounds what would hang, far from what anything takes
PAUSE_SECONDS = 0.05  # between two looks


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
