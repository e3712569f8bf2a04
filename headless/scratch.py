"""Temporary folders of a run. One that a killed run left behind goes when the next one makes its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..trust.atomic_files import locked

OWNER = ".owner"  # in a folder: locked for as long as the process that made it lives, however that ends


@contextmanager
def temporary_folder(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """A new folder in `where` (default: the system's own), gone at the end. Raises OSError where none can be made."""
    where = where or Path(tempfile.gettempdir())
    _remove_orphans(where, prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unnamed = folder / f"{OWNER}-new"  # takes its name when it is locked, so that none finds it unlocked before
        with unnamed.open("wb") as file:
            with suppress(OSError):  # no locks, or no renaming of open files: nobody takes the folder for an orphan
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
