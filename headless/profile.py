"""`onediff-guard profile`: what runs taught about models: list, show, export, import."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import answer
from .errors import OutputError, WorkflowError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..nodes.host import PROFILES_VARIABLE

    parser.add_argument(
        "--dir", type=Path, metavar="DIR",
        help=f"folder of profiles (default: {PROFILES_VARIABLE}, or ~/.onediff-guard/profiles; in ComfyUI they are in "
        "user/onediff_guard/profiles)",
    )  # fmt: skip
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("list", help="name them all")
    listing.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    show = actions.add_parser("show", help="print one, as JSON")
    show.add_argument("name", help="its name, or the beginning of it")
    export = actions.add_parser("export", help="copy one to a file, to share it")
    export.add_argument("name", help="its name, or the beginning of it")
    export.add_argument("file", type=Path)
    taken = actions.add_parser("import", help="check a file and keep it")
    taken.add_argument("file", type=Path)


def main(args: argparse.Namespace) -> int:
    """0 where it was done."""
    from ..nodes import profiles

    try:
        _ACTIONS[args.action](profiles.folder(args.dir), args)
    except profiles.BadProfile as error:
        raise WorkflowError(str(error)) from error
    except OSError as error:
        raise OutputError(f"It could not be written: {error}.") from error
    return 0


def _list(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import profiles

    found = profiles.listed(folder)
    if args.json:
        facts = [{"name": name, **_facts(profile)} for name, profile in found]
        answer.done(folder=folder, profiles=facts)
        return
    for name, profile in found:
        print(f"{name}\n    {profile if isinstance(profile, Exception) else profile.in_words()}")
    if not found:
        print(f"No profiles in {folder}. A run writes one when it has learned something.")


def _facts(profile: Any) -> dict[str, Any]:
    return {"error": str(profile)} if isinstance(profile, Exception) else json.loads(profile.text())


def _show(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import profiles

    print(profiles.one(folder, args.name).text(), end="")


def _export(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import profiles

    profiles.export(folder, args.name, args.file)
    print(args.file)


def _import(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import profiles

    name, words = profiles.take(folder, args.file)
    print(name)
    print(words, file=sys.stderr)


_ACTIONS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "list": _list,
    "show": _show,
    "export": _export,
    "import": _import,
}
