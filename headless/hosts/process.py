"""A child process that is ended with all its descendants, on POSIX and on Windows, also if this process is killed.

This file is also run as a script, the supervisor: it runs a command for an owner, and ends it with all its descendants
once the owner is gone, for whatever reason. The owner holds the other end of standard input and never writes:
end-of-file means that the owner ended, also by SIGKILL, a crash or the out-of-memory killer, which run no clean-up.
PR_SET_PDEATHSIG would do less: it depends on the thread that started the child, reaches no grandchild, and is for Linux
only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
NOT_STARTED = 127  # a shell's code for a command that cannot be run
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")


@contextmanager
def running(
    command: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command under a supervisor, which ends it and its descendants at the end, or when this process is gone. Its
    output goes to `log`.

    Both run in their own process group, so that Ctrl-C here does not reach them. The supervisor's exit code is the
    command's, or 128 plus the signal that ended it, or 127 if it cannot be run.
    """
    on_windows = sys.platform == "win32"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(STOP_SECONDS), *command],
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=not on_windows,
            creationflags=subprocess.CREATE_NEW_PROCESS_GROUP if on_windows else 0,
        )
    try:
        yield supervisor
    finally:
        assert supervisor.stdin
        supervisor.stdin.close()  # as if this process had ended
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(2 * STOP_SECONDS)
        _signal_group(supervisor.pid, "SIGKILL")  # processes that outlived the supervisor
        supervisor.wait()


def _signal_group(leader: int, name: str) -> None:
    """Signal all processes of a group; on Windows, end a process and its descendants."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(leader)], capture_output=True, check=False)
    else:
        with suppress(ProcessLookupError):
            os.killpg(leader, getattr(signal, name))


def _supervise(patience: float, command: list[str]) -> int:
    """Run a command. Returns its exit code, or 128 plus the signal that ended it. patience: seconds between SIGTERM and
    SIGKILL."""
    for name in SIGNALS:
        if hasattr(signal, name):  # caught, not ignored: the command would inherit "ignored"
            signal.signal(getattr(signal, name), lambda *_: None)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror or error}", file=sys.stderr, flush=True)
        return NOT_STARTED
    owner_gone = threading.Event()
    ending = threading.Thread(target=_end_with_owner, args=(child, patience, owner_gone), daemon=True)
    ending.start()
    code = child.wait()
    if owner_gone.is_set():
        ending.join()  # the command's descendants may still run
    return 128 - code if code < 0 else min(code, 255)


def _end_with_owner(child: subprocess.Popen[bytes], patience: float, owner_gone: threading.Event) -> None:
    with suppress(OSError):
        while os.read(0, 1024):
            ...
    owner_gone.set()
    if sys.platform == "win32":
        _signal_group(child.pid, "SIGKILL")
        return
    group = os.getpgrp()
    _signal_group(group, "SIGTERM")
    with suppress(subprocess.TimeoutExpired):
        child.wait(patience)
    _signal_group(group, "SIGKILL")  # including this process


if __name__ == "__main__":
    os._exit(_supervise(float(sys.argv[1]), sys.argv[2:]))  # ordinary exit could wait for a thread in a read
