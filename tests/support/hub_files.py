"""Files that tests put on a hub, and checks of the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ID = "owner/small-video"
DENOISER = "transformer/diffusion_pytorch_model.safetensors"


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def text(files: Mapping[str, bytes], path: str, **changes: Any) -> dict[str, bytes]:
    """The files with changes in one JSON file."""
    return {**files, path: json.dumps({**json.loads(files[path]), **changes}).encode()}


def without(files: Mapping[str, bytes], *paths: str) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if path not in paths}


def is_cached(revision: str | None = None) -> bool:
    from comfyui_onediff_guard.pipelines.errors import BadFolder, HubError
    from comfyui_onediff_guard.pipelines.models.hub import fetch

    try:
        fetch(ID, revision, download=False)
    except (HubError, BadFolder):
        return False
    return True


class Stop(Exception):
    """An exception raised by a host's progress bar."""


def stop_after(n_bytes: int) -> Callable[[int, int, str], None]:
    def progress(done: int, _total: int, _text: str) -> None:
        if done > n_bytes:
            raise Stop

    return progress
