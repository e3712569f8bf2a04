"""Result files: whole or not at all, never over another file, never outside the output folder."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from ..trust import paths
from ..trust.atomic_files import temporary_in
from ..trust.text import shown
from .errors import OutputError, WorkflowError

PREVIEW_FOLDER = "temp"  # below the output folder; where files of ComfyUI's type "temp" go
_COUNTED = re.compile(r"(?P<stem>.*)_(?P<counter>[0-9]{5,9})_", re.DOTALL)
_COUNTER = "_99999999_.webp"  # what a name still has to hold beside the prefix


@dataclass(frozen=True)
class FileEntry:
    """One file in a node's `ui` dictionary, as ComfyUI lists it."""

    filename: str
    subfolder: str = ""
    type: str = "output"  # or temp, input

    @property
    def path(self) -> str:
        """Where it lies below the output folder of a headless run, by its own words: for messages."""
        return "/".join(part for part in (self._folder, self.filename) if part)

    @property
    def _folder(self) -> str:
        return "/".join(part for part in (PREVIEW_FOLDER if self.type == "temp" else "", self.subfolder) if part)

    def folder_in(self, output: Path) -> Path:
        """Its folder in a headless run's output folder.

        Raises:
            OutputError: it points outside, by its own words or through a link.
        """
        try:
            if not self.filename or paths.relative(self.filename).name != self.filename:
                raise paths.Outside(f"'{shown(self.filename)}' is no file's name")
            return paths.inside(output, self.path).parent
        except paths.Outside as fault:
            raise OutputError(
                f"A node names a file outside the output folder: {shown(self.path, 200)} ({fault}). It was not written."
            ) from None


@dataclass(frozen=True)
class Prefix:
    """A `filename_prefix` resolved to a place below the output folder."""

    folder: Path
    stem: str
    subfolder: str  # relative to the output folder, with forward slashes


def file_entries(ui: Mapping[str, Any]) -> Iterator[FileEntry]:
    """The files that a node's `ui` dictionary lists, under whichever key."""
    for values in ui.values():
        for item in values if isinstance(values, (list, tuple)) else ():
            if isinstance(item, Mapping) and isinstance(item.get("filename"), str):
                subfolder, kind = item.get("subfolder") or "", item.get("type") or "output"
                if not (isinstance(subfolder, str) and isinstance(kind, str)):
                    raise OutputError(f"A node lists a file in a way that is not ComfyUI's: {shown(dict(item), 200)}.")
                yield FileEntry(item["filename"], subfolder, kind)


def expand_prefix(prefix: str, width: int, height: int) -> str:
    """ComfyUI's placeholders (%width%, %height%, %year% ... %second%) filled in."""
    names, now = ("year", "month", "day", "hour", "minute", "second"), time.strftime("%Y %m %d %H %M %S").split()
    values = {"width": width, "height": height, **dict(zip(names, now, strict=True))}
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", str(value))
    return prefix


def check_prefix(prefix: str) -> Path:
    """A `filename_prefix` as a path below the output folder; raises WorkflowError where it is none, or too long."""
    try:
        path = paths.relative(prefix)
        paths.relative(f"{path.name}{_COUNTER}")
    except paths.Outside as fault:
        raise WorkflowError(
            f"filename_prefix {fault}, and files never go out of the output folder. "
            "Use a short relative path without '..', and choose the folder with --out."
        ) from None
    return path


def resolve_prefix(output: Path, prefix: str, *, width: int = 0, height: int = 0) -> Prefix:
    """Where files of this prefix go. Sizes in pixels.

    Raises:
        WorkflowError: the prefix leads out of `output`, by itself or through a symbolic link.
    """
    path = check_prefix(expand_prefix(prefix, width, height))
    try:
        folder = paths.inside(output, path.parent.as_posix())
    except paths.Outside as fault:
        raise WorkflowError(f"filename_prefix {fault}, out of the output folder {output}: choose another.") from None
    subfolder = path.parent.as_posix()
    return Prefix(folder, path.name, "" if subfolder == "." else subfolder)


def ensure_writable(folder: Path) -> None:
    """Find out before hours of sampling that a folder takes no files.

    Raises:
        OutputError: it can't be made, or nothing can be written there.
    """
    with _arriving(folder):
        ...


def write_counted(folder: Path, stem: str, suffix: str, data: bytes) -> Path:
    """Write `<stem>_00001_<suffix>`, or the next number that is free, as ComfyUI does.

    The bytes go to a temporary file in the same folder, which takes its final name once it is complete. The name
    is claimed first, so that two processes that share a folder don't overwrite each other.

    Raises:
        OutputError: disk full, no permission and the like; nothing is left behind.
    """
    counter = _next_counter(folder, stem)
    return _write(folder, data, (f"{stem}_{n:05}_{suffix}" for n in count(counter)))


def write_together(folder: Path, stem: str, contents: Mapping[str, bytes]) -> list[Path]:
    """Write `<stem><suffix>` for each suffix, all or none; where one is taken, all under the next number that is free.

    Raises:
        OutputError: disk full, no permission and the like; nothing is left behind.
    """
    if any((folder / f"{stem}{suffix}").exists() for suffix in contents):
        stem = f"{stem}_{_next_counter(folder, stem):05}_"
    written: list[Path] = []
    try:
        for suffix, data in contents.items():
            written.append(_write(folder, data, iter([f"{stem}{suffix}"])))
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


class Arriving:
    """A file that is being written; it takes its name at the end."""

    path: Path  # once it is whole

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self._folder, self._file = folder, file

    def write(self, data: bytes) -> None:
        """Raises OutputError."""
        with _told(self._folder, self.size + len(data)):
            self._file.write(data)

    def start_again(self) -> None:
        """Forget what was written."""
        self._file.seek(0)
        self._file.truncate()

    @property
    def size(self) -> int:
        """In bytes, so far."""
        return self._file.tell()


@contextmanager
def arriving(folder: Path, name: str) -> Generator[Arriving]:
    """A file that is written bit by bit, under its own name or where that is taken under the next number that is free.
    Nothing is left of it where the block raises.

    Raises:
        OutputError: disk full, no permission and the like.
    """
    with _arriving(folder, _names(folder, name)) as file:
        yield file


def _names(folder: Path, name: str) -> Iterator[str]:
    yield name
    stem, suffix = Path(name).stem, Path(name).suffix
    counted = _COUNTED.fullmatch(stem)
    stem = counted["stem"] if counted else stem
    for counter in count(_next_counter(folder, stem)):
        yield f"{stem}_{counter:05}_{suffix}"


def _write(folder: Path, data: bytes, names: Iterator[str]) -> Path:
    with _arriving(folder, names) as file:
        file.write(data)
    return file.path


@contextmanager
def _arriving(folder: Path, names: Iterator[str] | None = None) -> Generator[Arriving]:
    """names: those it may take; without any it is not kept."""
    with ExitStack() as opened:
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            temporary, file = opened.enter_context(temporary_in(folder))
        written = Arriving(folder, file)
        yield written
        if names is not None:
            with _told(folder, written.size):
                file.flush()
                os.fsync(file.fileno())
                written.path = _publish(temporary, file, names)


def _publish(temporary: Path, file: BinaryIO, names: Iterator[str]) -> Path:
    """Give a file the first name that is free, in one step."""
    for name in names:
        target = temporary.with_name(name)
        try:
            os.link(temporary, target)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            try:
                target.touch(exist_ok=False)
            except FileExistsError:
                continue
            if os.name == "nt":
                file.close()  # Windows renames no open file
            try:
                temporary.replace(target)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
        return target
    raise FileExistsError(errno.EEXIST, "no free name", str(temporary.parent))


def _next_counter(folder: Path, stem: str) -> int:
    """One more than the highest number in use for this stem, of any file type."""
    highest = 0
    for path in folder.glob("*") if folder.is_dir() else ():
        counted = _COUNTED.match(path.name)
        if counted and os.path.normcase(counted["stem"]) == os.path.normcase(stem):
            highest = max(highest, int(counted["counter"]))
    return highest + 1


@contextmanager
def _told(target: Path, size: int = 0) -> Iterator[None]:
    """Raises OutputError where the block cannot write. size: in bytes."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Check the folder's permissions, or choose another with --out."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full ({size / 1e6:.1f} MB were to be written)"
            advice = "Free some space, or choose another folder with --out."
        raise OutputError(f"Cannot write {target}: {reason}. {advice} Nothing was left half-written.") from error
