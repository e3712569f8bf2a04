"""The folder of a batch's outputs, which is all the state that a batch has.

`OUT/<content hash>/` holds what a job made and its `job.json`; it is there whole or not at all, since it takes its name
in one step. `OUT/parked/<content hash>.json` tells of a job that is not tried again. What was begun lies in
`OUT/.running/`, and goes when its worker ends, or with the next job after that one was killed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...trust.atomic_files import replacing
from ...trust.foreign import Foreign, Unreadable, fitting, read
from ...trust.plain import for_json
from ...trust.text import for_file_name
from ..errors import OutputError
from ..files import ensure_writable
from ..scratch import temporary_folder

FORMAT = 1
RECORD = "job.json"
PARKED, RUNNING = "parked", ".running"
MAX_ERROR = 4000  # characters of one


class Parked(Foreign):
    """Why a job is not tried again."""

    format: Literal[1] = FORMAT
    content: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    name: Annotated[str, Field(max_length=400)]
    error: Annotated[str, Field(max_length=MAX_ERROR)]
    attempts: int  # that were made


@dataclass(frozen=True)
class Outputs:
    """The outputs of batches in one folder."""

    folder: Path

    def ensure(self) -> None:
        """Raises OutputError where nothing can be written there."""
        ensure_writable(self.folder / RUNNING)

    @contextmanager
    def token(self) -> Iterator[str]:
        """The name of something new in the folder, by which another machine sees that this is the same folder."""
        self.ensure()
        with temporary_folder(_of_this_machine("batch"), self.folder / RUNNING) as made:
            yield made.relative_to(self.folder).as_posix()

    def has(self, content: str) -> bool:
        """Whether a job's outputs are there, whole."""
        return (self.folder / content / RECORD).is_file()

    @contextmanager
    def arriving(self, content: str) -> Iterator[Arriving]:
        """A folder for what a job makes. It becomes the job's at the end, or nothing where the block raises.

        Raises:
            OutputError: disk full, no permission and the like.
        """
        with self.errors_told():
            (self.folder / RUNNING).mkdir(parents=True, exist_ok=True)
        with temporary_folder(_of_this_machine("job"), self.folder / RUNNING) as temporary:
            made = Arriving(temporary / "made")
            with self.errors_told():
                made.folder.mkdir()
            yield made
            with self.errors_told():
                self._publish(made, self.folder / content)

    def park(self, parked: Parked) -> None:
        """Raises OutputError."""
        with self.errors_told():
            (self.folder / PARKED).mkdir(parents=True, exist_ok=True)
            with replacing(self._parked(parked.content)) as stream:
                stream.write(json.dumps(parked.model_dump(), indent=2).encode() + b"\n")

    def parked(self, content: str) -> Parked | None:
        """Why a job is not tried again, if it is not. What cannot be read is no reason."""
        try:
            return fitting(Parked, read(self._parked(content), limit=2**20))
        except (OSError, Unreadable):
            return None

    def unpark(self, content: str) -> None:
        """Have a job tried again."""
        with self.errors_told():
            self._parked(content).unlink(missing_ok=True)

    def _parked(self, content: str) -> Path:
        return self.folder / PARKED / f"{content}.json"

    def _publish(self, made: Arriving, target: Path) -> None:
        with (made.folder / RECORD).open("x", encoding="utf-8") as stream:
            json.dump(for_json({"format": FORMAT, **made.record}), stream, indent=2, allow_nan=False)
            stream.flush()
            os.fsync(stream.fileno())
        _settle(made.folder)
        try:
            made.folder.rename(target)
        except OSError:
            if not self.has(target.name):  # else another worker, or another batch, was there first
                raise
        _settle(self.folder)

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Raise what goes wrong with the folder as OutputError."""
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"Cannot write to {self.folder}: {error.strerror or error}. Check its permissions and the disk's room, "
                "or choose another folder with --out. What is there is whole; the same command goes on from it."
            ) from error


class Arriving:
    """What a job makes, on its way into its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: Mapping[str, Any] = {}  # for its job.json

    def names(self, files: list[Path]) -> list[str]:
        """Files in it, by their paths from its top."""
        return [file.relative_to(self.folder).as_posix() for file in files]


def _of_this_machine(what: str) -> str:
    """How a temporary folder's name begins. What a killed worker left is removed on its own machine alone: others may
    not see on a network's file system that a folder is somebody's."""
    return f"{what}-{for_file_name(socket.gethostname())}~"


def _settle(folder: Path) -> None:
    """Have the disk hold the names in a folder, where a system can be told to."""
    with suppress(OSError, AttributeError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
