"""A check whether another user of this machine could have put code where we would run it."""

from __future__ import annotations

import os
from pathlib import Path

_OTHERS, _OTHERS_WRITE = 0o077, 0o022


def why_unsafe_below(folder: Path) -> str:
    """Return who else could have written a folder, or anything in it; "" if only this user and the administrator could,
    if the folder is missing, and on Windows, which has no such owners and modes. In a folder that others cannot enter,
    files may have any mode."""
    if os.name != "posix":
        return ""
    closed = folder.is_dir() and not folder.stat().st_mode & _OTHERS
    for place, folders, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in (*folders, *files))):
            try:
                found = path.stat()
            except OSError:  # gone meanwhile
                continue
            if found.st_uid not in (os.geteuid(), 0):
                return f"'{path}': it belongs to another user (number {found.st_uid})"
            if not closed and found.st_mode & _OTHERS_WRITE:
                return f"'{path}': other users can write to it (mode {found.st_mode & 0o777:o})"
    return ""
