"""Helpers that check and change model folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.models.folder import family_of, inspect
from safetensors.torch import load_file, save_file


def checked(folder: Path) -> Any:
    return inspect(folder, family_of(folder))


def say(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(known | fields), encoding="utf-8")


def put(file: Path, content: Any) -> None:
    """Change a file. content: None deletes it, bytes replace it, a dictionary changes fields of its JSON, a list
    replaces its JSON, text renames it."""
    if content is None:
        file.unlink()
    elif isinstance(content, dict):
        say(file, **content)
    elif isinstance(content, str):
        file.rename(file.with_name(content))
    else:
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def file_of(folder: Path, name: str) -> Path:
    """The weights file of a component."""
    (file,) = (folder / name).glob("*.safetensors")
    return file


def rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    """Change a component's tensors on disk."""
    file = file_of(folder, name)
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors
