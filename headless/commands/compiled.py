"""`onediff-guard compiled`: list, export, import and clear code that inductor compiled for later runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ...comfyui_host.host import COMPILED_VARIABLE, compiled_directory
from ...pipelines.compile import cache
from ...pipelines.errors import BadCompiled
from ...precision.arch import detect
from ...precision.machine import default_device, platform_of
from ...trust.atomic_files import delete, size_of
from . import kept_files
from .answer import Answer

TRUST = "Such a file holds code that will run here. Import it only from people you trust."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = TRUST
    whose = "machines like this one"
    actions = kept_files.add_arguments(parser, "compiled code", COMPILED_VARIABLE, "compiled", whose)
    cleared = actions.add_parser("clear", help="delete all, or those whose names start with NAME")
    cleared.add_argument("name", nargs="?", default="", help="start of their names (default: all)")


def main(args: argparse.Namespace) -> Answer:
    actions = {"list": _list, "export": _export, "import": _import, "clear": _clear}
    return kept_files.act(args, args.dir or compiled_directory(), actions)


def _list(compile_cache_dir: Path, _args: argparse.Namespace) -> Answer:
    found = []
    for name, folder in _by_name(compile_cache_dir).items():
        size = size_of(folder)
        try:
            target = cache.exportable(folder)[0]
            facts, words = {"for": asdict(target)}, target.in_words()
        except (BadCompiled, OSError) as error:
            facts, words = {"error": str(error)}, str(error)
        found.append((name, f"{size / 1e6:.1f} MB; {words}", {"bytes": size, **facts}))
    none = f"No compiled code in {compile_cache_dir}. Runs that compile with inductor keep their code there."
    return kept_files.listing(compile_cache_dir, "compiled", found, none)


def _export(compile_cache_dir: Path, args: argparse.Namespace) -> Answer:
    folder = kept_files.the_one(_by_name(compile_cache_dir), args.name, compile_cache_dir, "folder of compiled code")
    cache.write(args.file, *cache.exportable(folder))
    return Answer([args.file])


def _import(compile_cache_dir: Path, args: argparse.Namespace) -> Answer:
    """Check a file and keep it, without running its code."""
    try:
        target, artifacts = cache.read(args.file)
    except OSError as error:
        raise BadCompiled(f"'{args.file}' cannot be read: {error}.") from error
    device = default_device()
    if misfit := target.machine.misfit(platform_of(device, detect(device).name)):
        raise BadCompiled(
            f"'{args.file.name}' cannot be used on this machine: {misfit}. Export it on a machine like this one, or "
            "let a run compile here."
        )
    cache.keep_imported(compile_cache_dir, target, artifacts)
    return kept_files.imported(target.name, f"{target.in_words()}\nIt holds code that later runs of this model run.")


def _clear(compile_cache_dir: Path, args: argparse.Namespace) -> Answer:
    names = {name: folder for name, folder in _by_name(compile_cache_dir).items() if name.startswith(args.name)}
    for folder in names.values():
        delete(folder)
    return Answer(sorted(names))


def _by_name(compile_cache_dir: Path) -> dict[str, Path]:
    """Return the kept folders by name, the last used first."""
    return {folder.name.removesuffix(cache.SUFFIX): folder for folder in cache.kept_folders(compile_cache_dir)}
