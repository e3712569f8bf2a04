"""Ends a Ray that this machine's command started, once the command is gone, however it went.

This file is also run as a script. Its owner holds the other end of standard input: the end of file is the owner's end,
also by SIGKILL, which runs no clean-up. Some of Ray's processes would live on for a minute then, workers with the GPU's
memory among them, and have lost their parents before we can look: so we look all the time. What began since is known by
a variable that it inherits.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

VARIABLE = "ONEDIFF_GUARD_RAY"
LOOK_SECONDS = 1.0  # between two looks at what the owner has started
ROUNDS = 20  # of looking for what was started while others were ended


@contextmanager
def kept() -> Generator[dict[str, str]]:
    """Yields a variable: what has it when it starts is ended with this process. At the end of the block, all is let
    go."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-I", __file__, mark, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as keeper:
        try:
            yield {VARIABLE: mark}
        finally:
            keeper.kill()  # before the end of file


def _has(process: psutil.Process, mark: str) -> bool:
    variables = Path(f"/proc/{process.pid}/environ")
    if not variables.exists():
        return process.environ().get(VARIABLE) == mark
    return f"{VARIABLE}={mark}".encode() in variables.read_bytes()  # Ray's titles overwrite some, where psutil ends


def _lives(process: psutil.Process) -> bool:
    """A zombie does not, which nobody may ever take notice of, as in a container without an init process."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _below(processes: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with suppress(psutil.Error):
            yield from process.children(recursive=True)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if _has(process, mark):
                yield process


def _owner(pid: int) -> list[psutil.Process]:
    """The process that started this one, or none where it is gone already: its number may be another's by now."""
    with suppress(psutil.NoSuchProcess):
        owner = psutil.Process(pid)
        if os.getppid() == pid:
            return [owner]
    return []


def _watch(owner: list[psutil.Process], mark: str) -> set[psutil.Process]:
    """What the owner has started, once it is gone."""
    known = set[psutil.Process]()
    with selectors.DefaultSelector() as watched:
        watched.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while not watched.select(LOOK_SECONDS):
            known |= {*_below(owner)}
    return known | {*_below(known)} | {*_marked(mark)}


def _end(found: set[psutil.Process], mark: str) -> None:
    for _ in range(ROUNDS):
        found = {each for each in found if each.pid != os.getpid() and _lives(each)}
        if not found:
            return
        for process in found:
            with suppress(psutil.Error):  # one that is gone, whose number another has by now
                process.kill()
        _, alive = psutil.wait_procs([*found], timeout=1)
        found = {*alive, *_marked(mark)}


if __name__ == "__main__":
    _end(_watch(_owner(int(sys.argv[2])), sys.argv[1]), sys.argv[1])
