"""`onediff-guard compiled`: code that inductor compiled and later runs use: list, export, import, clear."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...trust.text import for_terminal
from . import answer, kept_files

if TYPE_CHECKING:
    from ...pipelines.compile.target import Target
    from ...precision.machine import Platform

TRUST = "Such a file holds code that will be run. Import it only from people whom you trust."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ...comfyui_host.host import COMPILED_VARIABLE

    parser.epilog = TRUST
    whose = "machines like this one"
    actions = kept_files.add_arguments(parser, "compiled code", COMPILED_VARIABLE, "compiled", whose)
    cleared = actions.add_parser("clear", help="delete all, or those whose names start so")
    cleared.add_argument("name", nargs="?", default="", help="the beginning of their names (default: all)")


def main(args: argparse.Namespace) -> int:
    """0 where it was done."""
    from ...comfyui_host.host import compiled_directory
    from ...pipelines.errors import BadCompiled

    actions = {"list": _list, "export": _export, "import": _import, "clear": _clear}
    return kept_files.act(args, args.dir or compiled_directory(), BadCompiled, actions)


def _list(folder: Path, args: argparse.Namespace) -> None:
    found = [(name, file.lstat().st_size, _target_or_why_not(file)) for name, file in _by_name(folder).items()]
    if args.json:
        facts = [{"name": name, "bytes": size, **_facts(target)} for name, size, target in found]
        answer.done(folder=folder, compiled=facts)
        return
    for name, size, target in found:
        words = target if isinstance(target, Exception) else target.in_words()
        print(for_terminal(f"{name}\n    {size / 1e6:.1f} MB; {words}"))
    if not found:
        print(f"No compiled code in {folder}. A run keeps what inductor compiled for it.")


def _target_or_why_not(file: Path) -> Target | Exception:
    from ...pipelines.compile.code import read_target
    from ...pipelines.errors import BadCompiled

    try:
        return read_target(file)
    except (BadCompiled, OSError) as error:
        return error


def _facts(target: Any) -> dict[str, Any]:
    return {"error": str(target)} if isinstance(target, Exception) else {"for": asdict(target)}


def _export(folder: Path, args: argparse.Namespace) -> None:
    from ...pipelines.compile.code import check, copy
    from ...pipelines.errors import BadCompiled

    found = kept_files.the_one(_by_name(folder), args.name, folder, "that is kept", BadCompiled)
    check(found)
    copy(found, args.file)
    print(args.file)


def _import(folder: Path, args: argparse.Namespace) -> None:
    """Check a file and keep it, without running anything of it."""
    from ...pipelines.compile.code import SUFFIX, check, copy
    from ...pipelines.errors import BadCompiled

    try:
        target = check(args.file)
    except OSError as error:
        raise BadCompiled(f"'{args.file}' cannot be read: {error}.") from error
    if misfit := target.machine.misfit(_here()):
        raise BadCompiled(
            f"'{args.file.name}' cannot be used on this machine: {misfit}. Export it on a machine like this one, or "
            "let a run compile here."
        )
    folder.mkdir(parents=True, exist_ok=True)
    copy(args.file, folder / f"{target.name}{SUFFIX}")
    kept_files.say_imported(target.name, f"{target.in_words()}\nIt holds code, which later runs of this model run.")


def _clear(folder: Path, args: argparse.Namespace) -> None:
    cleared = {name: file for name, file in sorted(_by_name(folder).items()) if name.startswith(args.name)}
    for file in cleared.values():
        file.unlink()
    for name in cleared:
        print(name)


def _by_name(folder: Path) -> dict[str, Path]:
    """Those used last first."""
    from ...pipelines.compile.cache import kept_files
    from ...pipelines.compile.code import SUFFIX

    return {file.name.removesuffix(SUFFIX): file for file in kept_files(folder)}


def _here() -> Platform:
    from ...precision.arch import detect
    from ...precision.machine import default_device, platform_of

    device = default_device()
    return platform_of(device, detect(device).name)
