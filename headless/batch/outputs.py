"""The folder of a batch's outputs, which is all the state that a batch has.

`OUT/<content hash>/` holds what a job made and its `job.json`; it is there whole or not at all, since it takes its name
in one step. `OUT/parked/<content hash>.json` tells of a job that is not tried again. What was begun lies in
`OUT/.running/`, and goes when its worker ends, or with the next job after that one was killed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from ...trust.atomic_files import locked, temporary_in, write_whole
from ...trust.foreign import Foreign, Unreadable, fitting, read
from ...trust.message import for_file_name
from ...trust.plain import for_json
from ..files import ensure_writable, temporary_folder, writing

FORMAT = 1
RECORD = "job.json"
PARKED, RUNNING = "parked", ".running"


class Parked(Foreign):
    error: str


@dataclass(frozen=True)
class Outputs:
    """The outputs of batches in one folder. What writes raises OutputError: disk full, no permission and the like."""

    folder: Path

    def ensure(self) -> None:
        """Find out whether anything can be written there."""
        ensure_writable(self.folder / RUNNING)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.folder, "What is there is whole; the same command goes on from it.")

    def claim(self, content: str) -> BinaryIO | None:
        """A locked file, for the command that computes a job; None where another one does. The system unlocks what a
        killed command held. Where a network folder has no locks, two may compute a job, and the first result stays."""
        with self._writing():
            stream = self._claim(content).open("ab")
            if locked(stream) or not self._has_locks:
                return stream
            stream.close()
            return None

    def release(self, content: str, claim: BinaryIO) -> None:
        with claim, suppress(OSError):  # Windows removes no open file: an empty one stays, and is free
            self._claim(content).unlink()

    def _claim(self, content: str) -> Path:
        return self.folder / RUNNING / f"{content}.claim"

    @cached_property
    def _has_locks(self) -> bool:
        with temporary_in(self.folder / RUNNING) as (_, probe):
            return locked(probe)

    @contextmanager
    def token(self) -> Iterator[str]:
        """The name of something new in the folder, by which another machine sees that this is the same folder."""
        with self._temporary("batch") as made:
            yield made.relative_to(self.folder).as_posix()

    def has(self, content: str) -> bool:
        """Whether a job's outputs are there, whole."""
        return (self.folder / content / RECORD).is_file()

    @contextmanager
    def arriving(self, content: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """A folder for what a job makes, and its record, to be filled in. They become the job's at the end, or nothing
        where the block raises."""
        with self._temporary("job") as temporary:
            folder, record, target = temporary / "made", {"format": FORMAT}, self.folder / content
            with self._writing():
                folder.mkdir()
            yield folder, record
            with self._writing():
                with (folder / RECORD).open("x", encoding="utf-8") as stream:
                    json.dump(for_json(record), stream, indent=2, allow_nan=False)
                    stream.flush()
                    os.fsync(stream.fileno())
                try:
                    folder.rename(target)
                except OSError:
                    if not self.has(content):  # else another worker, or another batch, was there first
                        raise

    @contextmanager
    def _temporary(self, what: str) -> Iterator[Path]:
        """What a killed worker left is removed on its own machine alone: others may not see on a network's file system
        that a folder is somebody's."""
        prefix, running = f"{what}-{for_file_name(socket.gethostname())}~", self.folder / RUNNING
        with ExitStack() as held:
            with self._writing():
                running.mkdir(parents=True, exist_ok=True)
                made = held.enter_context(temporary_folder(prefix, running))
            yield made

    def park(self, content: str, name: str, error: str, attempts: int) -> None:
        facts = {"format": FORMAT, "content": content, "name": name, "error": error, "attempts": attempts}
        with self._writing():
            (self.folder / PARKED).mkdir(parents=True, exist_ok=True)
            write_whole(self._parked(content), json.dumps(facts, indent=2).encode() + b"\n")

    def parked(self, content: str) -> str:
        """Why a job is not tried again, or "". What cannot be read is no reason."""
        try:
            return fitting(Parked, read(self._parked(content), limit=2**20)).error
        except (OSError, Unreadable):
            return ""

    def unpark(self, content: str) -> None:
        with self._writing():
            self._parked(content).unlink(missing_ok=True)

    def _parked(self, content: str) -> Path:
        return self.folder / PARKED / f"{content}.json"
