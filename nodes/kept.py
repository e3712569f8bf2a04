"""What is kept for later runs, found by its name or the beginning of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SHOWN = 10


def the_one(files: Mapping[str, Path], name: str, where: Path, what: str, error: type[Exception]) -> Path:
    """files: by name. what: they are called. Raises `error` where it is none or several."""
    starting = {each: file for each, file in sorted(files.items()) if each.startswith(name)}
    found = {name: starting[name]} if name in starting else starting
    if len(found) != 1:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        which = f"{', '.join(list(found)[:_SHOWN]) or 'none'}{more}"
        raise error(f"The name of one {what} must start with '{name}', and these do: {which}. Looked in {where}.")
    return next(iter(found.values()))
