"""What a loader's list shows: the models that it can load. A folder's index or a file's header tells, without torch."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ...trust.foreign import object_in, read
from ..families import svd_keys
from ..families.svd import SVD
from ..safetensors_header import header_text
from ..small_files import MOST_CONFIG_BYTES

_SVD_HAS = (svd_keys.SIGNATURE, svd_keys.TEMPORAL_DECODER, *svd_keys.PREFIXES.values())
_SVD_LACKS = tuple(parts for _, parts in svd_keys.OTHERS if svd_keys.SIGNATURE in parts)


def can_be(path: Path, pipelines: Collection[str]) -> bool:
    """Return whether a folder in diffusers format, or a single file, looks like one of these diffusers pipelines.

    One that cannot be read does not. Loading checks all of it, and says what is wrong.
    """
    with suppress(OSError):
        file = path if path.is_file() else path / "model_index.json"
        stat = file.stat()
        return _pipeline(file, stat.st_size, stat.st_mtime_ns) in pipelines
    return False


@lru_cache(maxsize=2**14)
def _pipeline(file: Path, _size: int, _modified: int) -> str:
    """Return the diffusers pipeline that a model_index.json names, or a checkpoint holds; "" where it is none.

    It is remembered until the file changes, also of a file that cannot be read.
    """
    with suppress(OSError, ValueError):  # Unreadable among them
        return _read_pipeline(file)
    return ""


def _read_pipeline(file: Path) -> str:
    if file.suffix.lower() != ".safetensors":
        return str(object_in(read(file, limit=MOST_CONFIG_BYTES)).get("_class_name", ""))
    header = header_text(file)  # not parsed: of a hundred checkpoints that would take seconds
    holds_svd = all(_begins(header, key) for key in _SVD_HAS)
    return (
        SVD.pipeline if holds_svd and not any(all(_begins(header, key) for key in keys) for keys in _SVD_LACKS) else ""
    )


def _begins(header: bytes, key: str) -> bool:
    """Return whether the name of a tensor begins with `key`."""
    return f'"{key}'.encode() in header
