"""What people have set on ComfyUI's page."""

from __future__ import annotations

import json
import logging
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DEFAULT = "default"  # the user where ComfyUI has but one


def settings_of(user: str = DEFAULT) -> dict[str, Any]:
    """A user's settings by their ids; {} without ComfyUI."""
    folder_paths = sys.modules.get("folder_paths") or sys.modules.get("comfy.cmd.folder_paths")
    directory = getattr(folder_paths, "get_user_directory", None)  # 0.0.1 has none
    if directory is None:
        return {}
    file = Path(directory()) / user / "comfy.settings.json"
    try:
        return _held(file, file.stat().st_mtime_ns)
    except OSError:  # nothing was set yet
        return {}


@lru_cache(maxsize=8)
def _held(file: Path, _changed: int) -> dict[str, Any]:
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        logger.warning("Cannot read %s, so nothing counts as set in it: %s", file.name, error)
        return {}
    return held if isinstance(held, dict) else {}
