"""Shared code of `onediff-guard profile` and `onediff-guard compiled`: list, export and import files of a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...trust.message import listed
from ..errors import OutputError, WorkflowError
from .answer import Answer

Action = Callable[[Path, argparse.Namespace], Answer]  # on the folder


def add_arguments(parser: argparse.ArgumentParser, what: str, variable: str, folder: str, whose: str) -> Any:
    """Add the arguments of both commands. Returns the subparsers, for further actions. folder: its name in ComfyUI's
    user folder. whose: the receivers of an exported file."""
    parser.add_argument(
        "--dir", type=Path, metavar="DIR",
        help=f"folder of {what} (default: {variable}, or ~/.onediff-guard/{folder}; in ComfyUI it is "
        f"user/onediff_guard/{folder})",
    )  # fmt: skip
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("list", help="list all")
    listing.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    export = actions.add_parser("export", help=f"copy one to a file, for {whose}")
    export.add_argument("name", help="its name, or the start of it")
    export.add_argument("file", type=Path)
    taken = actions.add_parser("import", help="check a file and store it", description=parser.epilog)
    taken.add_argument("file", type=Path)
    return actions


def act(args: argparse.Namespace, folder: Path, actions: Mapping[str, Action]) -> Answer:
    try:
        return actions[args.action](folder, args)
    except OSError as error:
        raise OutputError(f"Cannot write the file: {error}.") from error


def listing(folder: Path, key: str, found: Sequence[tuple[str, str, Mapping[str, Any]]], none: str) -> Answer:
    """Return the answer of `list`. found: name, description and facts of each. none: the line if there are none."""
    lines = [f"{name}\n    {words}" for name, words, _ in found] or [none]
    return Answer(lines, {"folder": folder, key: [{"name": name, **facts} for name, _, facts in found]})


def the_one(files: Mapping[str, Path], name: str, where: Path, what: str) -> Path:
    """Find a file by its name, or the beginning of it. Raises WorkflowError if no file or several match.

    files: by name. what: the kind of file, for messages.
    """
    found = [name] if name in files else sorted(each for each in files if each.startswith(name))
    if len(found) != 1:
        which = listed(found, most=10, limit=255) or "none"
        raise WorkflowError(f"'{name}' must match one {what}. Matches: {which}. Looked in {where}.")
    return files[found[0]]


def imported(name: str, words: str) -> Answer:
    """Print the description for people. Returns the name, for scripts."""
    print(words, file=sys.stderr)
    return Answer([name])
