"""What people have set on ComfyUI's page."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

DEFAULT = "default"  # the user where ComfyUI has but one


def settings_of(user: str = DEFAULT) -> dict[str, Any]:
    """A user's settings by their ids, and the default user's where they have set nothing. {} without ComfyUI."""
    folder_paths = sys.modules.get("folder_paths") or sys.modules.get("comfy.cmd.folder_paths")
    directory = getattr(folder_paths, "get_user_directory", None)  # 0.0.1 has none
    if directory is None:
        return {}
    files = [Path(directory()) / each / "comfy.settings.json" for each in dict.fromkeys((DEFAULT, user))]
    return {name: value for file in files for name, value in _read(file).items()}


def _read(file: Path) -> dict[str, Any]:
    try:
        return _held(file, file.stat().st_mtime_ns)
    except (OSError, ValueError):
        return {}


@lru_cache(maxsize=8)
def _held(file: Path, _changed: int) -> dict[str, Any]:
    held = json.loads(file.read_text(encoding="utf-8"))
    return held if isinstance(held, dict) else {}
