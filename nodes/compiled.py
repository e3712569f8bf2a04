"""What the console command asks about compiled code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..pipelines.errors import BadCompiled
from .kept import the_one

if TYPE_CHECKING:
    from ..pipelines.compile.code import Platform


def folder(named: Path | None) -> Path:
    return named or host.compiled_directory()


def listed(where: Path) -> list[tuple[str, int, Any]]:
    """(name, bytes, Target, or what went wrong in place of one that cannot be used) of each, used last first."""
    from ..pipelines.compile.code import read_target

    def target(file: Path) -> Any:
        try:
            return read_target(file)
        except (BadCompiled, OSError) as error:
            return error

    return [(name, file.lstat().st_size, target(file)) for name, file in _named(where).items()]


def in_words(where: Path) -> str:
    """Where it is, and how much of how much is used."""
    from ..pipelines.atomic_files import LIMIT_VARIABLE, limit_of
    from ..pipelines.compile.cache import INDUCTOR, exported, kept_files

    try:
        limit = limit_of(os.environ)
    except ValueError as error:
        return f"{LIMIT_VARIABLE} is not used: {error}"
    if own := exported():
        return f"inductor's own, {INDUCTOR}={own}, as it was exported"
    if not limit:
        return f"off ({LIMIT_VARIABLE}=0)"
    try:
        sizes = [file.stat().st_size for file in kept_files(where)]
    except OSError as error:
        return f"{where} cannot be read: {error}"
    return f"{where}, {len(sizes)} kept, {sum(sizes) / 1e9:.2g} of {limit:g} GB"


def export(where: Path, name: str, file: Path) -> None:
    """Raises BadCompiled, OSError."""
    from ..pipelines.compile.code import check, copy

    found = the_one(_named(where), name, where, "that is kept", BadCompiled)
    check(found)
    copy(found, file)


def take(where: Path, file: Path) -> tuple[str, str]:
    """Check a file and keep it, without running anything of it; its name, and what it is for in words.

    Raises BadCompiled, OSError.
    """
    from ..pipelines.compile.code import SUFFIX, check, copy

    try:
        target = check(file)
    except OSError as error:
        raise BadCompiled(f"'{file}' cannot be read: {error}.") from error
    if misfit := target.machine.misfit(_here()):
        raise BadCompiled(
            f"'{file.name}' cannot be used on this machine: {misfit}. Export it on a machine like this one, or let a "
            "run compile here."
        )
    where.mkdir(parents=True, exist_ok=True)
    copy(file, where / f"{target.name}{SUFFIX}")
    return target.name, f"{target.in_words()}\nIt holds code, which later runs of this model run."


def clear(where: Path, name: str) -> list[str]:
    """Delete those whose names start so; which. Raises OSError."""
    cleared = {each: file for each, file in sorted(_named(where).items()) if each.startswith(name)}
    for file in cleared.values():
        file.unlink()
    return list(cleared)


def _named(where: Path) -> dict[str, Path]:
    from ..pipelines.compile.cache import kept_files
    from ..pipelines.compile.code import SUFFIX

    return {file.name.removesuffix(SUFFIX): file for file in kept_files(where)}


def _here() -> Platform:
    from ..pipelines.compile.cache import platform_of
    from ..pipelines.weights.placement import default_device
    from ..precision.arch import detect

    device = default_device()
    return platform_of(device, detect(device).name)
