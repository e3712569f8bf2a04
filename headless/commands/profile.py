"""`onediff-guard profile`: list, show, export and import the precision overrides of models."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...comfyui_host.host import PROFILES_VARIABLE, profiles_directory
from ...precision.overrides import BadProfile, Profile, read, read_all, write
from ...trust.atomic_files import write_whole
from . import kept_files
from .answer import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whose = "others with this model and card"
    actions = kept_files.add_arguments(parser, "profiles", PROFILES_VARIABLE, "profiles", whose)
    show = actions.add_parser("show", help="print one, as JSON")
    show.add_argument("name", help="its name, or the start of it")


def main(args: argparse.Namespace) -> Answer:
    actions = {"list": _list, "show": _show, "export": _export, "import": _import}
    return kept_files.act(args, args.dir or profiles_directory(), actions)


def _list(folder: Path, _args: argparse.Namespace) -> Answer:
    found = [
        (file.stem, str(profile), {"error": str(profile)})
        if isinstance(profile, BadProfile)
        else (file.stem, profile.in_words(), json.loads(profile.text()))
        for file, profile in read_all(folder)
    ]
    none = f"No profiles in {folder}. A run writes one when it has learned something."
    return kept_files.listing(folder, "profiles", found, none)


def _show(folder: Path, args: argparse.Namespace) -> Answer:
    return Answer([_the_one(folder, args.name).text().removesuffix("\n")])


def _export(folder: Path, args: argparse.Namespace) -> Answer:
    return Answer([write_whole(args.file, _the_one(folder, args.name).text().encode())])


def _import(folder: Path, args: argparse.Namespace) -> Answer:
    profile = read(args.file)
    return kept_files.imported(write(folder, profile).stem, profile.in_words())


def _the_one(folder: Path, name: str) -> Profile:
    """Return the profile whose name starts with `name`. Raises WorkflowError if none or several match, BadProfile if it
    cannot be used."""
    return read(kept_files.the_one({file.stem: file for file in folder.glob("*.json")}, name, folder, "profile"))
