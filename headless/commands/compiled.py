"""`onediff-guard compiled`: code that inductor compiled and later runs use: list, export, import, clear."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...trust.text import for_terminal
from . import answer
from . import kept_files as kept

TRUST = "Such a file holds code that will be run. Import it only from people whom you trust."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ...comfyui_host.host import COMPILED_VARIABLE

    parser.epilog = TRUST
    actions = kept.add_arguments(parser, "compiled code", COMPILED_VARIABLE, "compiled", "machines like this one")
    cleared = actions.add_parser("clear", help="delete all, or those whose names start so")
    cleared.add_argument("name", nargs="?", default="", help="the beginning of their names (default: all)")


def main(args: argparse.Namespace) -> int:
    """0 where it was done."""
    from ...nodes import compiled

    return kept.act(args, compiled, compiled.BadCompiled, {"list": _list, "clear": _clear})


def _list(folder: Path, args: argparse.Namespace) -> None:
    from ...nodes import compiled

    found = compiled.listed(folder)
    if args.json:
        facts = [{"name": name, "bytes": size, **_facts(target)} for name, size, target in found]
        answer.done(folder=folder, compiled=facts)
        return
    for name, size, target in found:
        words = target if isinstance(target, Exception) else target.in_words()
        print(for_terminal(f"{name}\n    {size / 1e6:.1f} MB; {words}"))
    if not found:
        print(f"No compiled code in {folder}. A run keeps what inductor compiled for it.")


def _facts(target: Any) -> dict[str, Any]:
    return {"error": str(target)} if isinstance(target, Exception) else {"for": asdict(target)}


def _clear(folder: Path, args: argparse.Namespace) -> None:
    from ...nodes import compiled

    for name in compiled.clear(folder, args.name):
        print(name)
