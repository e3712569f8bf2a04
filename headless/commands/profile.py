"""`onediff-guard profile`: what runs taught about models: list, show, export, import."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...trust.text import for_terminal
from . import answer, kept_files

if TYPE_CHECKING:
    from ...precision.profile_store import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ...comfyui_host.host import PROFILES_VARIABLE

    whose = "others with this model and card"
    actions = kept_files.add_arguments(parser, "profiles", PROFILES_VARIABLE, "profiles", whose)
    show = actions.add_parser("show", help="print one, as JSON")
    show.add_argument("name", help="its name, or the beginning of it")


def main(args: argparse.Namespace) -> int:
    """0 where it was done."""
    from ...comfyui_host.host import profiles_directory
    from ...precision.profile_store import BadProfile

    actions = {"list": _list, "show": _show, "export": _export, "import": _import}
    return kept_files.act(args, args.dir or profiles_directory(), BadProfile, actions)


def _list(folder: Path, args: argparse.Namespace) -> None:
    from ...precision.profile_store import read_all

    found = [(file.stem, profile) for file, profile in read_all(folder)]
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
    print(_the_one(folder, args.name).text(), end="")


def _export(folder: Path, args: argparse.Namespace) -> None:
    from ...precision.profile_store import write_text

    write_text(args.file, _the_one(folder, args.name).text())
    print(args.file)


def _import(folder: Path, args: argparse.Namespace) -> None:
    from ...precision.profile_store import read, write

    profile = read(args.file)
    kept_files.say_imported(write(folder, profile).stem, profile.in_words())


def _the_one(folder: Path, name: str) -> Profile:
    """The profile whose name starts so. Raises BadProfile where it is none or several, or cannot be used."""
    from ...precision.profile_store import BadProfile, read

    files = {file.stem: file for file in folder.glob("*.json")}
    return read(kept_files.the_one(files, name, folder, "profile", BadProfile))
