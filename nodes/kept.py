"""What is kept for later runs, found by its name or the beginning of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..trust.text import listed


def the_one(files: Mapping[str, Path], name: str, where: Path, what: str, error: type[Exception]) -> Path:
    """files: by name. what: they are called. Raises `error` where it is none or several."""
    starting = {each: file for each, file in sorted(files.items()) if each.startswith(name)}
    found = {name: starting[name]} if name in starting else starting
    if len(found) != 1:
        which = listed(found, most=10, limit=255) or "none"
        raise error(f"The name of one {what} must start with '{name}', and these do: {which}. Looked in {where}.")
    return next(iter(found.values()))
