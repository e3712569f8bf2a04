"""What a loader's list shows: models that it can load, told by a folder's index or a file's header, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from . import svd_keys
from .families import SVD

_LARGEST_HEADER = 100 * 2**20  # safetensors' own limit
_SVD_HAS = (svd_keys.SIGNATURE, svd_keys.TEMPORAL_DECODER, *svd_keys.PREFIXES.values())
_SVD_LACKS = tuple(parts for _, parts in svd_keys.OTHERS if svd_keys.SIGNATURE in parts)


def can_be(path: Path, pipelines: Collection[str]) -> bool:
    """Whether a folder in diffusers format, or a single file, looks like one of these diffusers pipelines.

    What cannot be read does not. Loading checks all of it, and says what is wrong.
    """
    try:
        file = path if path.is_file() else path / "model_index.json"
        stat = file.stat()
        return _pipeline(file, stat.st_size, stat.st_mtime_ns) in pipelines
    except (OSError, ValueError, RecursionError):  # the last of brackets without end
        return False


@lru_cache(maxsize=2**14)
def _pipeline(file: Path, size: int, _modified: int) -> str:
    """The diffusers pipeline that a model_index.json names, or a checkpoint holds; "" where it is none."""
    if file.suffix.lower() != ".safetensors":
        index = json.loads(file.read_text(encoding="utf-8"))
        return str(index.get("_class_name", "")) if isinstance(index, dict) else ""
    header = _header(file, size)
    holds_svd = all(_begins(header, key) for key in _SVD_HAS)
    return (
        SVD.pipeline if holds_svd and not any(all(_begins(header, key) for key in keys) for keys in _SVD_LACKS) else ""
    )


def _header(file: Path, size: int) -> bytes:
    """A safetensors file's header, not parsed: of a hundred checkpoints that would take seconds."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        return stream.read(length) if length <= min(_LARGEST_HEADER, size - 8) else b""


def _begins(header: bytes, key: str) -> bool:
    """Whether the name of a tensor begins so."""
    return f'"{key}'.encode() in header
