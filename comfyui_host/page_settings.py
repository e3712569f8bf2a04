"""The users' settings on ComfyUI's page."""

from __future__ import annotations

import json
import logging
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from .compat import unless_changed

logger = logging.getLogger(__name__)

DEFAULT = "default"  # the user of a ComfyUI with one user


def settings_of(user: str = DEFAULT) -> dict[str, Any]:
    """Return a user's settings by id; {} without ComfyUI."""
    directory = user_directory()
    if directory is None:
        return {}
    file = directory / user / "comfy.settings.json"
    try:
        return _held(file, file.stat().st_mtime_ns)
    except OSError:  # nothing was set yet
        return {}


@unless_changed("reading the page's settings and language", None)
def user_directory() -> Path | None:
    """Return ComfyUI's user folder; None if this process is not a ComfyUI, or if ComfyUI has none (0.0.1)."""
    folder_paths = sys.modules.get("folder_paths") or sys.modules.get("comfy.cmd.folder_paths")
    return Path(folder_paths.get_user_directory()) if folder_paths else None


@lru_cache(maxsize=8)
def _held(file: Path, _changed: int) -> dict[str, Any]:
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        logger.warning("Cannot read %s, so its settings are ignored: %s", file.name, error)
        return {}
    return held if isinstance(held, dict) else {}
