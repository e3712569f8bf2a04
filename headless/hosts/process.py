"""A child process with all its descendants, ended as one, on POSIX and on Windows, and with us in any case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 10.0  # between the polite signal and the other one
KEEPER = Path(__file__).with_name("keeper.py")


def start(command: Sequence[str], *, cwd: Path, log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command under a keeper, which ends it when this process is gone. Its output goes to `log`.

    Both run in a process group of their own, so that Ctrl-C here doesn't reach them. The keeper's exit code is the
    command's, or 128 and the signal that ended it, or 127 where it can't be run.
    """
    kept = [sys.executable, "-I", "-S", str(KEEPER), str(STOP_SECONDS), *command]
    on_windows = sys.platform == "win32"
    with log.open("wb") as output:
        return subprocess.Popen(
            kept,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=not on_windows,
            creationflags=subprocess.CREATE_NEW_PROCESS_GROUP if on_windows else 0,
        )


def stop_tree(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything it started; returns once it is gone."""
    if sys.platform == "win32":
        command = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            os.killpg(process.pid, signal.SIGKILL)  # those that ignored it, and orphans of the group
    process.wait()
    if process.stdin:
        process.stdin.close()
