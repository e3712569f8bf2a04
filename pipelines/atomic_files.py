"""Files that outlast the process: written whole or not at all, and dropped where they grow beyond a limit."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "ONEDIFF_GUARD_COMPILED_GB"
DEFAULT_LIMIT = 2.0  # GB


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream that becomes `file` at the end, or nothing where the body raises.

    Raises OSError; of these FileExistsError where a link, a folder, a pipe or a device is there: somebody put it there
    for something else.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise FileExistsError(f"'{file}' is there, and is no file of its own. Name another, or remove it")
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        Path(temporary).replace(file)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def limit_of(variables: Mapping[str, str]) -> float:
    """How many GB of compiled code may be kept; 0: nothing is. Raises ValueError."""
    given = variables.get(LIMIT_VARIABLE, "").strip()
    limit = float(given) if given else DEFAULT_LIMIT
    if not 0 <= limit < float("inf"):
        raise ValueError(f"{given} is not a number of GB")
    return limit


def limit_here(tell: Callable[[str], None]) -> float:
    """As `limit_of` the environment; the default where that says none, with a line."""
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
    """Delete files or folders of `kept`, those not used longest first, until all fit `limit` GB. `used` stays."""
    left = limit * 1e9 - _bytes(used)
    for path in sorted((path for path in kept if path != used), key=last_used, reverse=True):
        with suppress(OSError):
            left -= _bytes(path)
            if left < 0:
                logger.info("more than %g GB of compiled code: dropping %s", limit, path.name)
                delete(path)


def delete(path: Path) -> None:
    """A file, or a folder with all that is in it. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())
