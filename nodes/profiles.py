"""What the console command asks about profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..pipelines.errors import BadProfile
from . import host


def folder(named: Path | None) -> Path:
    return named or host.profiles_directory()


def listed(where: Path) -> list[tuple[str, Any]]:
    """(name, Profile, or BadProfile in place of one that cannot be used) of each."""
    from ..pipelines.profiles import kept

    return [(file.stem, profile) for file, profile in kept(where)]


def one(where: Path, name: str) -> Any:
    """The Profile whose name starts so. Raises BadProfile where it is none or several, or cannot be used."""
    from ..pipelines.profiles import read

    files = sorted(file for file in where.glob("*.json") if file.stem.startswith(name)) if where.is_dir() else []
    found = [file for file in files if file.stem == name] or files
    if len(found) != 1:
        which = ", ".join(file.stem for file in found) or "none"
        raise BadProfile(f"One profile's name must start with '{name}', and these do: {which}. Looked in {where}.")
    return read(found[0])


def export(where: Path, name: str, file: Path) -> None:
    """Raises BadProfile, OSError."""
    from ..pipelines.profiles import write_text

    write_text(file, one(where, name).text())


def take(where: Path, file: Path) -> tuple[str, str]:
    """Check a file and keep it; its name, and what it holds in words. Raises BadProfile, OSError."""
    from ..pipelines.profiles import read, write

    profile = read(file)
    return write(where, profile).stem, profile.in_words()
