"""Zip archives, changed."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path


def rewrite(file: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """change: contents by name → those that are written instead."""
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in change(contents).items():
            archive.writestr(name, content)
