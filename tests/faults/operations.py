"""Fault injection: counts the operations of a stage and runs an action before the n-th one.

An operation is a torch call in this thread, or the opening, creating, moving or deleting of a file in the watched
folders in any thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FILES = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate"})
Action = Callable[[], None]


class Operations:
    """Inside `with`: counts operations and calls `action` before number `at`, from 0."""

    def __init__(self, folders: Iterable[Path] = (), at: int = -1, action: Action | None = None, torch: bool = True):
        self.count = 0
        self.happened = ""  # the operation at which the action ran
        self._folders = tuple(str(folder) for folder in folders)
        self._at = at
        self._action = action or (lambda: None)
        self._torch = _Counting(self) if torch else None
        self._lock = threading.Lock()

    def one(self, name: str) -> None:
        with self._lock:
            now = self.count == self._at
            self.count += 1
        if now:
            self.happened = name
            self._action()

    def file(self, name: str, paths: Iterable[Any]) -> None:
        if any(isinstance(path, (str, os.PathLike)) and str(path).startswith(self._folders) for path in paths):
            self.one(name)

    def __enter__(self) -> Operations:
        global _listener
        _listener = self
        if self._torch:
            self._torch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        global _listener
        _listener = None
        if self._torch:
            self._torch.__exit__(*error)


class _Counting(TorchDispatchMode):
    def __init__(self, operations: Operations):
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operations.one(str(func))
        return func(*args, **(kwargs or {}))


_listener: Operations | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _listener is not None and event in FILES:
        _listener.file(event, arguments[:2])


sys.addaudithook(_audit)  # cannot be removed; does nothing without a listener


def spread(count: int, places: int) -> list[int]:
    """Evenly spaced operation numbers, from the first to the last."""
    places = min(places, count)
    return sorted({round(place * (count - 1) / max(places - 1, 1)) for place in range(places)})


def raising(error: BaseException) -> Action:
    def fail() -> None:
        raise error

    return fail


def killed_in_a_child(run: Callable[[], object], operations: Operations) -> int:
    """Run in a forked process until the action kills it. Returns its exit status."""
    assert torch.get_num_threads() == 1, "a forked child would wait forever for missing threads"
    child = os.fork()
    if child == 0:
        try:
            with operations:
                run()
        finally:
            os._exit(17)  # not killed
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def jumping_clock() -> Generator[None]:
    """Each read moves the time of day ten years back or forward and the duration clock an hour ahead, as if somebody
    set the clock and the machine slept."""
    day, slept = cycle((-3e8, 3e8)), count(3600, 3600)
    time_of_day, measuring = time.time, time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: time_of_day() + next(day))
        patch.setattr(time, "perf_counter", lambda: measuring() + next(slept))
        yield


def tree(*folders: Path) -> dict[str, bytes]:
    """Every file with its content; zip files without their timestamps."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if not path.is_dir()]
    return {str(path): _content(path) for path in paths}


def _content(path: Path) -> bytes:
    if not path.is_file():
        return b""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return repr([(entry.filename, entry.CRC) for entry in archive.infolist()]).encode()


@contextmanager
def full_disk(folder: Path, free: int) -> Generator[bool]:
    """`folder` on a disk with `free` bytes. Yields False where no file system can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={max(free, 4096)}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield bool(mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
