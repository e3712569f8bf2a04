"""What `onediff-guard profile` and `onediff-guard compiled` share: a folder of what is kept, list, export, import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...trust.text import for_terminal, listed
from ..errors import OutputError, WorkflowError

Action = Callable[[Path, argparse.Namespace], None]


def add_arguments(parser: argparse.ArgumentParser, what: str, variable: str, folder: str, whose: str) -> Any:
    """The arguments that both take, with the actions to add to. folder: its name in ComfyUI's user folder. whose: for
    whom one is exported."""
    parser.add_argument(
        "--dir", type=Path, metavar="DIR",
        help=f"folder of {what} (default: {variable}, or ~/.onediff-guard/{folder}; in ComfyUI it is "
        f"user/onediff_guard/{folder})",
    )  # fmt: skip
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("list", help="name them all")
    listing.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    export = actions.add_parser("export", help=f"copy one to a file, for {whose}")
    export.add_argument("name", help="its name, or the beginning of it")
    export.add_argument("file", type=Path)
    taken = actions.add_parser("import", help="check a file and keep it", description=parser.epilog)
    taken.add_argument("file", type=Path)
    return actions


def act(args: argparse.Namespace, folder: Path, bad: type[Exception], actions: Mapping[str, Action]) -> int:
    """0 where it was done. bad: what an action raises at what cannot be used."""
    try:
        actions[args.action](folder, args)
    except bad as error:
        raise WorkflowError(str(error)) from error
    except OSError as error:
        raise OutputError(f"It could not be written: {error}.") from error
    return 0


def the_one(files: Mapping[str, Path], name: str, where: Path, what: str, error: type[Exception]) -> Path:
    """Find a file by its name, or the beginning of it. Raises `error` where it is none or several.

    files: by name. what: they are called.
    """
    starting = {each: file for each, file in sorted(files.items()) if each.startswith(name)}
    found = {name: starting[name]} if name in starting else starting
    if len(found) != 1:
        which = listed(found, most=10, limit=255) or "none"
        raise error(f"The name of one {what} must start with '{name}', and these do: {which}. Looked in {where}.")
    return next(iter(found.values()))


def say_imported(name: str, words: str) -> None:
    """Print a name for scripts, and for people what it holds."""
    print(name)
    print(for_terminal(words), file=sys.stderr)
