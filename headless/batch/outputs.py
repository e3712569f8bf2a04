"""The output folder of a batch, which is its only state.

`OUT/<content hash>/` contains a job's files and its `job.json`; it appears atomically, by a rename.
`OUT/parked/<content hash>.json` describes a job that is not retried. Unfinished outputs are in `OUT/.running/`; they
are removed when their worker ends, or by the next job if that one was killed.
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
    """The outputs of batches in one folder. Methods that write raise OutputError (disk full, no permission)."""

    folder: Path

    def ensure(self) -> None:
        """Check that the folder can be written to."""
        ensure_writable(self.folder / RUNNING)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.folder, "Finished jobs are complete; run the same command to continue.")

    def claim(self, content: str) -> BinaryIO | None:
        """Lock a job for this command. Returns the locked file; None if another command has the job. The system unlocks
        a killed command's file. In a network folder without locks two may compute a job; the first result stays."""
        with self._writing():
            stream = self._claim(content).open("ab")
            if locked(stream) or not self._has_locks:
                return stream
            stream.close()
            return None

    def release(self, content: str, claim: BinaryIO) -> None:
        with claim, suppress(OSError):  # Windows cannot remove an open file: an empty, unlocked one stays
            self._claim(content).unlink()

    def _claim(self, content: str) -> Path:
        return self.folder / RUNNING / f"{content}.claim"

    @cached_property
    def _has_locks(self) -> bool:
        with temporary_in(self.folder / RUNNING) as (_, probe):
            return locked(probe)

    @contextmanager
    def token(self) -> Iterator[str]:
        """Create a file in the folder and return its name: another machine that sees it has the same folder."""
        with self._temporary("batch") as made:
            yield made.relative_to(self.folder).as_posix()

    def has(self, content: str) -> bool:
        """Return whether a job's outputs are complete."""
        return (self.folder / content / RECORD).is_file()

    @contextmanager
    def arriving(self, content: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield a folder for a job's files, and its record to fill in. At the end they become the job's outputs; if the
        block raises, they are removed."""
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
                    if not self.has(content):  # else another worker or batch was faster
                        raise

    @contextmanager
    def _temporary(self, what: str) -> Iterator[Path]:
        """Yield a temporary folder. Those of killed workers are removed only on their own machine: on a network's file
        system, others may not see that a folder is in use."""
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
        """Return the reason why a job is parked; "" if it is not, or if its file cannot be read."""
        try:
            return fitting(Parked, read(self._parked(content), limit=2**20)).error
        except (OSError, Unreadable):
            return ""

    def unpark(self, content: str) -> None:
        with self._writing():
            self._parked(content).unlink(missing_ok=True)

    def _parked(self, content: str) -> Path:
        return self.folder / PARKED / f"{content}.json"
