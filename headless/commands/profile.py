"""`onediff-guard profile`: what runs taught about models: list, show, export, import."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ...trust.text import for_terminal
from . import answer
from . import kept_files as kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ...comfyui_host.host import PROFILES_VARIABLE

    actions = kept.add_arguments(parser, "profiles", PROFILES_VARIABLE, "profiles", "others with this model and card")
    show = actions.add_parser("show", help="print one, as JSON")
    show.add_argument("name", help="its name, or the beginning of it")


def main(args: argparse.Namespace) -> int:
    """0 where it was done."""
    from ...nodes import profiles

    return kept.act(args, profiles, profiles.BadProfile, {"list": _list, "show": _show})


def _list(folder: Path, args: argparse.Namespace) -> None:
    from ...nodes import profiles

    found = profiles.listed(folder)
    if args.json:
        facts = [{"name": name, **_facts(profile)} for name, profile in found]
        answer.done(folder=folder, profiles=facts)
        return
    for name, profile in found:
        print(for_terminal(f"{name}\n    {profile if isinstance(profile, Exception) else profile.in_words()}"))
    if not found:
        print(f"No profiles in {folder}. A run writes one when it has learned something.")


def _facts(profile: Any) -> dict[str, Any]:
    return {"error": str(profile)} if isinstance(profile, Exception) else json.loads(profile.text())


def _show(folder: Path, args: argparse.Namespace) -> None:
    from ...nodes import profiles

    print(profiles.one(folder, args.name).text(), end="")
