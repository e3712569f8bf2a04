"""Untrusted paths, which must stay inside a folder of ours."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath

from .message import is_whole, shown

MAX_PART = 255  # bytes of a file's name, on every file system in use
MAX_PATH = 1024  # characters, below a folder of ours
_FORBIDDEN = re.compile(r"[\x00-\x1f]")
_WINDOWS_OWN = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])\s*(\.|$)|.*([ .]$|[<>:\"|?*])", re.IGNORECASE)


class Outside(ValueError):
    """A path cannot be used. The message names the path and says why."""


def relative(name: str) -> Path:
    """Return a path that stays below any folder that it is joined to. It does not check links.

    Both slashes separate names, on every system. Raises Outside: absolute, a drive, `..`, a control character, too
    long; on Windows also a name that Windows takes for a device, a stream or another file.
    """
    given = shown(name)
    posix = name.replace("\\", "/")
    parts = PurePosixPath(posix).parts
    if PurePosixPath(posix).is_absolute() or PureWindowsPath(name).drive or ".." in parts:
        raise Outside(f"'{given}' leads out of its folder")
    if _FORBIDDEN.search(name):
        raise Outside(f"'{given}' holds a control character")
    for part in parts:
        if not is_whole(part):
            raise Outside(f"'{shown(part)}' holds half a character")
    if len(name) > MAX_PATH or any(len(os.fsencode(part)) > MAX_PART for part in parts):
        raise Outside(f"'{given}' is too long for a path: a name has at most {MAX_PART} bytes")
    if os.name == "nt" and any(map(means_another_on_windows, parts)):
        raise Outside(f"'{given}' is not a valid file name on Windows")
    return Path(*parts)


def means_another_on_windows(part: str) -> bool:
    """Return whether Windows takes a file's name for a device (CON, NUL.txt), a stream (a:b) or another name (`a.`)."""
    return _WINDOWS_OWN.match(part) is not None


def inside(folder: Path, name: str) -> Path:
    """Return the path of `name` in a folder. Raises Outside as `relative` does, and if a link on the way leads out."""
    path = folder / relative(name)
    try:
        resolved = path.resolve()
        circular = any(map(Path.is_symlink, (resolved, *resolved.parents)))  # which Python 3.13 leaves unresolved
        lies_inside = not circular and resolved.is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle, before 3.13
        lies_inside = False
    if not lies_inside:
        raise Outside(f"'{shown(name)}' leads out of its folder through a link")
    return path
