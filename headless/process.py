"""A child process with all its descendants, ended as one, on POSIX and on Windows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 10.0  # between the polite signal and the other one


def start(command: Sequence[str], *, cwd: Path, log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, so that Ctrl-C here doesn't reach it. Its output goes to `log`."""
    with log.open("wb") as output:
        if sys.platform == "win32":
            flags = subprocess.CREATE_NEW_PROCESS_GROUP
            return subprocess.Popen(
                command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, creationflags=flags
            )
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def stop_tree(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything it started; returns once it is gone."""
    if sys.platform == "win32":
        command = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        process.wait()
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)  # those that ignored it, and orphans of the group
    process.wait()
