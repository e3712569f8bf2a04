"""Files that outlast the process: written atomically, and deleted beyond a total size.

A file's bytes go to a temporary file next to it. A killed process leaves that file; a process that writes into the
folder a day later deletes it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "ONEDIFF_GUARD_COMPILED_GB"
DEFAULT_LIMIT = 2.0  # GB
STALE_SECONDS = 24 * 3600.0  # without a byte written
_TEMPORARY = ".onediff-guard-{}.tmp"
_IS_TEMPORARY = re.compile(r"\.onediff-guard-[0-9a-f]{32}\.tmp")


def write_whole(file: Path, content: bytes) -> Path:
    """Write a file with that content atomically, in place of an earlier one. Returns the file.

    Raises OSError; in particular FileExistsError if a link, a folder, a pipe or a device has that name.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise FileExistsError(f"'{file}' is a link, a folder or a device. Choose another name, or remove it")
    with temporary_in(file.parent) as (temporary, stream):
        temporary.chmod(0o600)  # it may be code that will be run
        stream.write(content)
        stream.close()
        temporary.replace(file)
    return file


@contextmanager
def temporary_in(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield path and stream of a new file, which is deleted at the end unless it was renamed. Raises OSError."""
    _remove_stale(folder)
    path = folder / _TEMPORARY.format(uuid.uuid4().hex)
    stream = path.open("xb")
    try:
        yield path, stream
    finally:
        with suppress(OSError):  # flushing its buffer fails on a full disk
            stream.close()
        with suppress(OSError):
            path.unlink(missing_ok=True)


def locked(stream: BinaryIO) -> bool:
    """Lock an open file for as long as it is open; the system unlocks it when the process dies. Returns False if
    another process, or another open file of this one, has the lock, or if the file system has no locks."""
    with suppress(OSError):
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@lru_cache(maxsize=256)
def _remove_stale(folder: Path) -> None:
    """Delete temporary files that killed processes left. Runs once per process and folder."""
    for path in folder.iterdir():
        with suppress(OSError):
            if _IS_TEMPORARY.fullmatch(path.name) and time.time() - path.lstat().st_mtime > STALE_SECONDS:
                path.unlink()


def limit_of(variables: Mapping[str, str]) -> float:
    """Return how many GB of compiled code may be kept; 0: none. Raises ValueError."""
    given = variables.get(LIMIT_VARIABLE, "").strip()
    limit = float(given) if given else DEFAULT_LIMIT
    if not 0 <= limit < float("inf"):
        raise ValueError(f"{given} is not a number of GB")
    return limit


def limit_here(tell: Callable[[str], None]) -> float:
    """Return `limit_of` the environment; the default, and call `tell` with a line, if the variable is invalid."""
    try:
        return limit_of(os.environ)
    except ValueError as error:
        tell(f"{LIMIT_VARIABLE} is not used: {error}. Write a number, such as {DEFAULT_LIMIT:g}")
        return DEFAULT_LIMIT


def last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def drop_oldest(kept: Iterable[Path], used: Path, limit: float) -> None:
    """Delete the least recently used files or folders of `kept` until the others fit `limit` GB. `used` stays."""
    left = limit * 1e9 - size_of(used)
    for path in sorted((path for path in kept if path != used), key=last_used, reverse=True):
        with suppress(OSError):
            left -= size_of(path)
            if left < 0:
                logger.info("more than %g GB of compiled code: dropping %s", limit, path.name)
                delete(path)


def delete(path: Path) -> None:
    """Delete a file, or a folder with its contents. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())
