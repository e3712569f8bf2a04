"""What tests of folders do that others made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfyui_onediff_guard.pipelines.models.folder import family_of, inspect


def checked(folder: Path) -> Any:
    return inspect(folder, family_of(folder))


def say(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")
