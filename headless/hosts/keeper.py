"""Runs a command for an owner, and ends it with all that it started once the owner is gone, however that went.

Started by `process.start` as a script of its own, in a process group of its own. The owner holds the other end of
standard input and never writes: the end of file is the owner's end, also by SIGKILL, by a crash or by the
out-of-memory killer, which run no clean-up. PR_SET_PDEATHSIG would do less: it goes with the thread that started the
child, reaches no grandchild, and is Linux's alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

NOT_STARTED = 127  # as of a shell
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")


def main(patience: float, command: list[str]) -> int:
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
        end = ["taskkill", "/F", "/T", "/PID", str(child.pid)]
        subprocess.run(end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return
    group = os.getpgrp()
    os.killpg(group, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(patience)
    os.killpg(group, signal.SIGKILL)  # this process with them


if __name__ == "__main__":
    os._exit(main(float(sys.argv[1]), sys.argv[2:]))  # a thread may wait in a read, which ordinary exit waits for
