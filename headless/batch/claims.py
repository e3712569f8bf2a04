"""Which batch computes a job, so that two with one folder of outputs compute none twice.

A claim is a file `OUT/.running/<content hash>.claim` that one command can make and no other meanwhile, with its owner.
A claim whose owner is dead is taken over: on the owner's machine at once, since its process is asked for. Other
machines cannot ask: there, a claim is dead that its owner has not touched for `STALE_SECONDS`, by clocks that differ by
less.
Where a claim was wrongly taken for dead, a job is computed twice, and the first result stays.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field

from ...trust.atomic_files import STALE_SECONDS, locked, temporary_in
from ...trust.foreign import Foreign, Unreadable, fitting, read

TOUCH_SECONDS = 30.0  # between two signs of life
SUFFIX = ".claim"
SAME = 1.0  # seconds by which two readings of when a process began may differ


class Owner(Foreign):
    host: Annotated[str, Field(max_length=255)]
    process: int
    began: float  # seconds since 1970


class Claims:
    """The claims of one command. folder: OUT/.running, which is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: set[str] = set()
        self._touched = time.monotonic()

    def take(self, content: str) -> bool:
        """Claim a job; False where another command has it. Raises OSError."""
        if not self.free(content):
            return False
        try:
            self._make(self._file(content))
        except FileExistsError:
            return False
        self._held.add(content)
        return True

    def _make(self, file: Path) -> None:
        """A claim with its owner in it, or none, whenever this process is killed: nobody could tell whose an empty one
        is."""
        with temporary_in(file.parent) as (whole, stream):
            stream.write(self._self.encode())
            stream.flush()
            try:
                os.link(whole, file)
            except FileExistsError:
                raise
            except OSError:  # a folder without hard links
                with file.open("xb") as empty:
                    empty.write(self._self.encode())

    def release(self, content: str) -> None:
        if content in self._held:
            self._held.discard(content)
            with suppress(OSError):
                self._file(content).unlink()

    def release_all(self) -> None:
        for content in [*self._held]:
            self.release(content)

    def touch(self) -> None:
        """Tell other machines that this command lives. Called often."""
        if time.monotonic() - self._touched < TOUCH_SECONDS:
            return
        self._touched = time.monotonic()
        for content in self._held:
            with suppress(OSError):
                os.utime(self._file(content))

    def free(self, content: str) -> bool:
        """Whether nobody has a job. A dead owner's claim is removed."""
        file = self._file(content)
        if not _dead(file):
            return not file.exists()
        with suppress(OSError), (self._folder / "claims.lock").open("ab") as lock:
            # One at a time: else the second removes what the first has claimed. A network folder may have no locks.
            if (locked(lock) or _age(file) > 2 * STALE_SECONDS) and _dead(file):
                file.unlink()
        return not file.exists()

    def sweep(self) -> None:
        """Remove the claims of the dead."""
        for file in self._folder.glob(f"*{SUFFIX}"):
            self.free(file.name.removesuffix(SUFFIX))

    def _file(self, content: str) -> Path:
        return self._folder / f"{content}{SUFFIX}"

    @cached_property
    def _self(self) -> str:
        began = psutil.Process().create_time()
        return json.dumps({"host": socket.gethostname(), "process": os.getpid(), "began": began})


def _dead(file: Path) -> bool:
    """Whether there is a claim whose owner is gone."""
    try:
        owner = fitting(Owner, read(file, limit=4096))
    except FileNotFoundError:
        return False
    except (OSError, Unreadable):  # cut short, or being written in a folder without hard links
        return _age(file) > STALE_SECONDS
    if owner.host != socket.gethostname():
        return _age(file) > STALE_SECONDS
    try:
        return abs(psutil.Process(owner.process).create_time() - owner.began) > SAME
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


def _age(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return 0.0
