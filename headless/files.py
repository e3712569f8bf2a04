"""Result files, and temporary folders of a run.

Results are written atomically, never over another file, never outside the output folder. A temporary folder that a
killed run left is removed when the next run creates its own.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from ..trust import paths
from ..trust.atomic_files import locked, temporary_in
from ..trust.message import shown
from .errors import ForeignFileError, OutputError, WorkflowError

PREVIEW_FOLDER = "temp"  # below the output folder, for files of ComfyUI's type "temp"
OWNER = ".owner"  # in a temporary folder: locked as long as the process that created the folder lives
_COUNTED = re.compile(r"(?P<stem>.*)_(?P<counter>[0-9]{5,9})_", re.DOTALL)
_COUNTER = "_99999999_.webp"  # the longest part of a name after the prefix


@dataclass(frozen=True)
class FileEntry:
    """One file in a node's `ui` dictionary, as ComfyUI lists it."""

    filename: str
    subfolder: str = ""
    type: str = "output"  # or temp

    @property
    def path(self) -> str:
        """Its path below the output folder as ComfyUI states it, unchecked: for messages."""
        folder = PREVIEW_FOLDER if self.type == "temp" else ""
        return "/".join(part for part in (folder, self.subfolder, self.filename) if part)

    def folder_in(self, output: Path) -> Path:
        """Return its folder in a headless run's output folder. Raises ForeignFileError if that is outside, by its path
        or through a link."""
        try:
            if not self.filename or paths.relative(self.filename).name != self.filename:
                raise paths.Outside(f"'{shown(self.filename)}' is not a file name")
            return paths.inside(output, self.path).parent
        except paths.Outside as fault:
            raise ForeignFileError(
                f"A node names a file outside the output folder: {shown(self.path, 200)} ({fault}). It was not written."
            ) from None


def file_entries(ui: Mapping[str, Any]) -> Iterator[FileEntry]:
    """Return the files that a node wrote: all that its `ui` dictionary lists, under any key, except input files.
    Raises ForeignFileError if an entry is not in ComfyUI's format."""
    for values in ui.values():
        for item in values if isinstance(values, (list, tuple)) else ():
            if isinstance(item, Mapping) and isinstance(item.get("filename"), str):
                subfolder, kind = item.get("subfolder") or "", item.get("type") or "output"
                if not (isinstance(subfolder, str) and isinstance(kind, str)):
                    raise ForeignFileError(
                        f"A node lists an output file in an unknown format: {shown(dict(item), 200)}."
                    )
                if kind != "input":
                    yield FileEntry(item["filename"], subfolder, kind)


def check_prefix(prefix: str) -> Path:
    """Return a `filename_prefix` as a path below the output folder. Raises WorkflowError if it is none, or too long."""
    try:
        path = paths.relative(prefix)
        paths.relative(f"{path.name}{_COUNTER}")
    except paths.Outside as fault:
        raise WorkflowError(
            f"filename_prefix {fault}, but files must stay in the output folder. Use a short relative path without "
            "'..', and choose the folder with --out."
        ) from None
    return path


def resolve_prefix(output: Path, prefix: str, *, width: int = 0, height: int = 0) -> tuple[Path, str]:
    """Return the folder of a prefix's files, and the beginning of their names, which may be "". ComfyUI's placeholders
    (%width%, %year% ... %second%) are filled in; sizes in pixels. Raises WorkflowError if the folder is outside of
    `output`, by its path or through a link."""
    names, now = ("year", "month", "day", "hour", "minute", "second"), time.strftime("%Y %m %d %H %M %S").split()
    for name, value in {"width": width, "height": height, **dict(zip(names, now, strict=True))}.items():
        prefix = prefix.replace(f"%{name}%", str(value))
    path = check_prefix(prefix)
    try:
        return paths.inside(output, path.parent.as_posix()), path.name
    except paths.Outside as fault:
        raise WorkflowError(f"filename_prefix {fault}: choose one inside the output folder {output}.") from None


def ensure_writable(folder: Path) -> None:
    """Check, before hours of sampling, that files can be written to a folder. Raises OutputError if it cannot be
    created or written to."""
    with _arriving(folder):
        ...


def write_counted(folder: Path, stem: str, suffix: str, data: bytes) -> Path:
    """Write `<stem>_00001_<suffix>`, or the next free number, as ComfyUI does. Raises OutputError (disk full, no
    permission); no partial file is left."""
    return _write(folder, data, _counted(folder, stem, suffix))


def write_together(folder: Path, stem: str, contents: Mapping[str, bytes]) -> list[Path]:
    """Write `<stem><suffix>` for each suffix, all or none; if a name is taken, all with the next free number. Raises
    OutputError (disk full, no permission); no partial file is left."""
    if any((folder / f"{stem}{suffix}").exists() for suffix in contents):
        stem = next(_counted(folder, stem, ""))
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
    """A file that is being written; it gets its name at the end."""

    path: Path  # its final path

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self.folder, self._file = folder, file

    def write(self, data: bytes) -> None:
        """Raises OutputError."""
        with writing(self.folder):
            self._file.write(data)

    def start_again(self) -> None:
        """Discard what was written so far."""
        self._file.seek(0)
        self._file.truncate()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()


def arriving(folder: Path, name: str) -> AbstractContextManager[Arriving]:
    """Yield a file to write in parts. It gets its own name, or the next free number if that is taken. If the block
    raises, nothing is left. Raises OutputError (disk full, no permission)."""
    stem, suffix = Path(name).stem, Path(name).suffix
    counted = _COUNTED.fullmatch(stem)
    return _arriving(folder, chain([name], _counted(folder, counted["stem"] if counted else stem, suffix)))


def _write(folder: Path, data: bytes, names: Iterator[str]) -> Path:
    with _arriving(folder, names) as file:
        file.write(data)
    return file.path


@contextmanager
def _arriving(folder: Path, names: Iterable[str] = ()) -> Iterator[Arriving]:
    """Yield a temporary file in the same folder. At the end it gets the first free name of `names`; without names, it
    is deleted."""
    with ExitStack() as opened:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            temporary, file = opened.enter_context(temporary_in(folder))
        written = Arriving(folder, file)
        yield written
        if names:
            with writing(folder):
                file.flush()
                os.fsync(file.fileno())
                written.path = _publish(temporary, file, names)


def _publish(temporary: Path, file: BinaryIO, names: Iterable[str]) -> Path:
    """Give a file the first free name, atomically: two processes that share a folder never overwrite each other's
    files."""
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
                file.close()  # Windows cannot rename an open file
            try:
                temporary.replace(target)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
        return target
    raise FileExistsError(errno.EEXIST, "no free name", str(temporary.parent))


def _counted(folder: Path, stem: str, suffix: str) -> Iterator[str]:
    """Yield numbered names, starting above the highest number in use for this stem, of any file type."""
    found = [_COUNTED.match(path.name) for path in folder.glob("*")]
    same = os.path.normcase(stem)
    used = [int(name["counter"]) for name in found if name and os.path.normcase(name["stem"]) == same]
    for number in count(max(used, default=0) + 1):
        yield f"{stem}_{number:05}_{suffix}"


@contextmanager
def writing(target: Path, left: str = "No incomplete file was left.") -> Iterator[None]:
    """Turn an OSError of the block into OutputError. left: what the message says is left."""
    try:
        yield
    except OSError as error:
        reason, advice = error.strerror or str(error), "Check the folder's permissions, or choose another with --out."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, advice = "the disk is full", "Free some space, or choose another folder with --out."
        raise OutputError(f"Cannot write {target}: {reason}. {advice} {left}") from error


@contextmanager
def temporary_folder(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `where` (default: the system's own), removed at the end. Raises OSError."""
    where = where or Path(tempfile.gettempdir())
    _remove_orphans(where, prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unnamed = folder / f"{OWNER}-new"  # renamed once it is locked, so that nobody finds it unlocked
        with unnamed.open("wb") as file:
            with suppress(OSError):  # without locks, or renaming of open files: nobody treats the folder as an orphan
                if locked(file):
                    unnamed.rename(folder / OWNER)
            yield folder


def _remove_orphans(where: Path, prefix: str) -> None:
    for folder in where.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.is_symlink() or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):
                continue
            with (folder / OWNER).open("r+b") as file:
                orphaned = locked(file)
            if orphaned:
                shutil.rmtree(folder, ignore_errors=True)
