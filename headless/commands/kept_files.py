"""What `onediff-guard profile` and `onediff-guard compiled` share: a folder of what is kept, list, export, import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ...trust.text import for_terminal
from ..errors import OutputError, WorkflowError

Action = Callable[[Path, argparse.Namespace], None]


class Kept(Protocol):
    """A module of `nodes`."""

    def folder(self, named: Path | None) -> Path: ...

    def export(self, where: Path, name: str, file: Path) -> None: ...

    def take(self, where: Path, file: Path) -> tuple[str, str]: ...


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


def act(args: argparse.Namespace, kept: Kept, bad: type[Exception], actions: Mapping[str, Action]) -> int:
    """0 where it was done. bad: what `kept` raises at what cannot be used. actions: besides export and import."""
    folder = kept.folder(args.dir)
    try:
        if args.action == "export":
            kept.export(folder, args.name, args.file)
            print(args.file)
        elif args.action == "import":
            name, words = kept.take(folder, args.file)
            print(name)
            print(for_terminal(words), file=sys.stderr)
        else:
            actions[args.action](folder, args)
    except bad as error:
        raise WorkflowError(str(error)) from error
    except OSError as error:
        raise OutputError(f"It could not be written: {error}.") from error
    return 0
