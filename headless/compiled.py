"""`onediff-guard compiled`: code that inductor compiled and later runs use: list, export, import, clear."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import answer
from .errors import OutputError, WorkflowError

TRUST = "Such a file holds code that will be run. Import it only from people whom you trust."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..nodes.host import COMPILED_VARIABLE

    parser.epilog = TRUST
    parser.add_argument(
        "--dir", type=Path, metavar="DIR",
        help=f"folder of compiled code (default: {COMPILED_VARIABLE}, or ~/.onediff-guard/compiled; in ComfyUI it is "
        "in user/onediff_guard/compiled)",
    )  # fmt: skip
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("list", help="name all, those used last first")
    listing.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    export = actions.add_parser("export", help="copy one to a file, for machines like this one")
    export.add_argument("name", help="its name, or the beginning of it")
    export.add_argument("file", type=Path)
    taken = actions.add_parser("import", help="check a file and keep it", description=TRUST)
    taken.add_argument("file", type=Path)
    cleared = actions.add_parser("clear", help="delete all, or those whose names start so")
    cleared.add_argument("name", nargs="?", default="", help="the beginning of their names (default: all)")


def main(args: argparse.Namespace) -> int:
    """0 where it was done."""
    from ..nodes import compiled

    try:
        _ACTIONS[args.action](compiled.folder(args.dir), args)
    except compiled.BadCompiled as error:
        raise WorkflowError(str(error)) from error
    except OSError as error:
        raise OutputError(f"It could not be written: {error}.") from error
    return 0


def _list(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import compiled

    found = compiled.listed(folder)
    if args.json:
        facts = [{"name": name, "bytes": size, **_facts(target)} for name, size, target in found]
        answer.done(folder=folder, compiled=facts)
        return
    for name, size, target in found:
        print(f"{name}\n    {size / 1e6:.1f} MB; {target if isinstance(target, Exception) else target.in_words()}")
    if not found:
        print(f"No compiled code in {folder}. A run keeps what inductor compiled for it.")


def _facts(target: Any) -> dict[str, Any]:
    return {"error": str(target)} if isinstance(target, Exception) else {"for": asdict(target)}


def _export(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import compiled

    compiled.export(folder, args.name, args.file)
    print(args.file)


def _import(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import compiled

    name, words = compiled.take(folder, args.file)
    print(name)
    print(words, file=sys.stderr)


def _clear(folder: Path, args: argparse.Namespace) -> None:
    from ..nodes import compiled

    for name in compiled.clear(folder, args.name):
        print(name)


_ACTIONS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "list": _list,
    "export": _export,
    "import": _import,
    "clear": _clear,
}
