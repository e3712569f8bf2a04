"""What the console command asks about profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..comfyui_host import host
from ..pipelines.errors import BadProfile
from .kept import the_one


def folder(named: Path | None) -> Path:
    return named or host.profiles_directory()


def listed(where: Path) -> list[tuple[str, Any]]:
    """(name, Profile, or BadProfile in place of one that cannot be used) of each."""
    from ..pipelines.run.profiles import kept

    return [(file.stem, profile) for file, profile in kept(where)]


def one(where: Path, name: str) -> Any:
    """The Profile whose name starts so. Raises BadProfile where it is none or several, or cannot be used."""
    from ..pipelines.run.profiles import read

    return read(the_one({file.stem: file for file in where.glob("*.json")}, name, where, "profile", BadProfile))


def export(where: Path, name: str, file: Path) -> None:
    """Raises BadProfile, OSError."""
    from ..pipelines.run.profiles import write_text

    write_text(file, one(where, name).text())


def take(where: Path, file: Path) -> tuple[str, str]:
    """Check a file and keep it; its name, and what it holds in words. Raises BadProfile, OSError."""
    from ..pipelines.run.profiles import read, write

    profile = read(file)
    return write(where, profile).stem, profile.in_words()
