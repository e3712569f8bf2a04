"""Result files: whole or not at all, never over another file, never outside the output folder."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import OutputError, WorkflowError

logger = logging.getLogger(__name__)

PREVIEW_FOLDER = "temp"  # below the output folder; where files of ComfyUI's type "temp" go
_COUNTED = re.compile(r"(?P<stem>.*)_(?P<counter>\d{5,})_")


@dataclass(frozen=True)
class FileEntry:
    """One file in a node's `ui` dictionary, as ComfyUI lists it."""

    filename: str
    subfolder: str = ""
    type: str = "output"  # or temp, input

    @property
    def folder(self) -> Path:
        """Its folder below the output folder of a headless run.

        Raises:
            OutputError: it points outside.
        """
        folder = Path(PREVIEW_FOLDER if self.type == "temp" else "", self.subfolder.replace("\\", "/"))
        if folder.is_absolute() or folder.drive or ".." in folder.parts or Path(self.filename).name != self.filename:
            raise OutputError(
                f"A node names a file outside the output folder: {self.subfolder}/{self.filename}. It was not written."
            )
        return folder


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
                yield FileEntry(item["filename"], item.get("subfolder") or "", item.get("type") or "output")


def expand_prefix(prefix: str, width: int, height: int) -> str:
    """ComfyUI's placeholders (%width%, %height%, %year% ... %second%) filled in."""
    now = time.localtime()
    values = {
        "width": width,
        "height": height,
        "year": now.tm_year,
        "month": f"{now.tm_mon:02}",
        "day": f"{now.tm_mday:02}",
        "hour": f"{now.tm_hour:02}",
        "minute": f"{now.tm_min:02}",
        "second": f"{now.tm_sec:02}",
    }
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", str(value))
    return prefix


def check_prefix(prefix: str) -> None:
    """Raises WorkflowError where a `filename_prefix` would leave the output folder."""
    path = Path(prefix.replace("\\", "/"))
    if path.is_absolute() or path.drive or prefix.startswith(("/", "\\")) or ".." in path.parts:
        raise WorkflowError(
            f"filename_prefix '{prefix}' leads out of the output folder. "
            "Use a relative path without '..', and choose the folder with --out."
        )


def resolve_prefix(output: Path, prefix: str, *, width: int = 0, height: int = 0) -> Prefix:
    """Where files of this prefix go. Sizes in pixels.

    Raises:
        WorkflowError: the prefix leads out of `output`, by itself or through a symbolic link.
    """
    prefix = expand_prefix(prefix, width, height)
    check_prefix(prefix)
    path = Path(prefix.replace("\\", "/"))
    folder = output / path.parent
    if not folder.resolve().is_relative_to(output.resolve()):
        raise WorkflowError(f"filename_prefix '{prefix}' leads out of the output folder {output}: choose another.")
    subfolder = path.parent.as_posix()
    return Prefix(folder, path.name, "" if subfolder == "." else subfolder)


def ensure_writable(folder: Path) -> None:
    """Find out before hours of sampling that a folder takes no files.

    Raises:
        OutputError: it can't be made, or nothing can be written there.
    """
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise _output_error(folder, 0, error) from error


def write_counted(folder: Path, stem: str, suffix: str, data: bytes) -> Path:
    """Write `<stem>_00001_<suffix>`, or the next number that is free, as ComfyUI does.

    The bytes go to a temporary file in the same folder, which takes its final name once it is complete. The name
    is claimed first, so that two processes that share a folder don't overwrite each other.

    Raises:
        OutputError: disk full, no permission and the like; nothing is left behind.
    """
    counter = _next_counter(folder, stem)
    return _write(folder, data, (f"{stem}_{n:05}_{suffix}" for n in _count_from(counter)))


def write_named(folder: Path, name: str, data: bytes) -> Path:
    """Write a file under its own name, or where that is taken under the next number that is free.

    Raises:
        OutputError: disk full, no permission and the like; nothing is left behind.
    """
    stem, suffix = Path(name).stem, Path(name).suffix
    counted = _COUNTED.fullmatch(stem)
    stem = counted["stem"] if counted else stem

    def names() -> Iterator[str]:
        yield name
        for counter in _count_from(_next_counter(folder, stem)):
            yield f"{stem}_{counter:05}_{suffix}"

    return _write(folder, data, names())


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


def _write(folder: Path, data: bytes, names: Iterator[str]) -> Path:
    temporary = folder / f".{uuid.uuid4().hex}.tmp"
    target = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            target = _claim(folder, names)
            try:
                temporary.replace(target)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _output_error(target, len(data), error) from error
    return target


def _claim(folder: Path, names: Iterator[str]) -> Path:
    for name in names:
        target = folder / name
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            continue
        return target
    raise FileExistsError(errno.EEXIST, "no free name", str(folder))


def _next_counter(folder: Path, stem: str) -> int:
    """One more than the highest number in use for this stem, of any file type."""
    highest = 0
    for path in folder.glob("*") if folder.is_dir() else ():
        counted = _COUNTED.match(path.name)
        if counted and os.path.normcase(counted["stem"]) == os.path.normcase(stem):
            highest = max(highest, int(counted["counter"]))
    return highest + 1


def _count_from(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1


def _output_error(target: Path, size: int, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    advice = "Check the folder's permissions, or choose another with --out."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = f"the disk is full ({size / 1e6:.1f} MB were to be written)"
        advice = "Free some space, or choose another folder with --out."
    return OutputError(f"Cannot write {target}: {reason}. {advice} Nothing was left half-written.")
