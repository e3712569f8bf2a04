"""A child process with all its descendants, ended as one, on POSIX and on Windows, and with us in any case.

This file is also run as a script, the supervisor: it runs a command for an owner, and ends it with all that it
started once the owner is gone, however that went. The owner holds the other end of standard input and never writes:
the end of file is the owner's end, also by SIGKILL, by a crash or by the out-of-memory killer, which run no clean-up.
PR_SET_PDEATHSIG would do less: it goes with the thread that started the child, reaches no grandchild, and is Linux's
alone.
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

STOP_SECONDS = 10.0  # between the polite signal and the other one
NOT_STARTED = 127  # as of a shell
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")


@contextmanager
def running(
    command: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A command under a supervisor, which ends it with everything that it started, at the end or when this process is
    gone. Its output goes to `log`.

    Both run in a process group of their own, so that Ctrl-C here doesn't reach them. The supervisor's exit code is the
    command's, or 128 and the signal that ended it, or 127 where it can't be run.
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
        supervisor.stdin.close()  # as if this process had gone
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(2 * STOP_SECONDS)
        _signal_group(supervisor.pid, "SIGKILL")  # those that outlived their supervisor
        supervisor.wait()


def _signal_group(leader: int, name: str) -> None:
    """Signal all that still are in a process group; on Windows, end a process and what it started."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(leader)], capture_output=True, check=False)
    else:
        with suppress(ProcessLookupError):
            os.killpg(leader, getattr(signal, name))


def _supervise(patience: float, command: list[str]) -> int:
    """The command's exit code, 128 and more where a signal ended it. patience: seconds between the polite signal and
    the other one."""
    for name in SIGNALS:
        if hasattr(signal, name):  # caught, not ignored: the command would inherit that
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
        ending.join()  # what the command started may still be there
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
    _signal_group(group, "SIGKILL")  # this process with them


if __name__ == "__main__":
    os._exit(_supervise(float(sys.argv[1]), sys.argv[2:]))  # a thread may wait in a read, which ordinary exit waits for
