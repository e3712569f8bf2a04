"""Models on disk, whichever way they are stored: folders in diffusers format, and Stable Video Diffusion's one file."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ..errors import BadFolder
from ..families import svd_keys
from ..families.spec import FamilySpec
from ..families.svd import SVD
from ..families.table import FAMILIES
from ..safetensors_header import header_text
from ..small_files import read_json
from . import folder
from .on_disk import StoredModel


def is_single_file(path: Path) -> bool:
    """Return whether a path means a file, there or not, rather than a diffusers-format folder."""
    return path.is_file() or (path.suffix.lower() == ".safetensors" and not path.is_dir())


def open_model(path: Path, expected: FamilySpec) -> StoredModel:
    """Check a model against a family, by JSON and safetensors headers alone, and return what it holds.

    Raises BadFolder where it is no model of the family, or not whole.
    """
    if not is_single_file(path):
        return folder.inspect(path, expected)
    if expected is not SVD:
        raise BadFolder(
            "'{}' is a file. Only {} loads from one: choose a {} folder.", path.name, SVD.name, expected.name
        )
    from .single_file import read_svd

    return read_svd(path)


def family_of(path: Path) -> FamilySpec:
    """Return the family that a folder's model_index.json names, or for a file the only family that has such.

    Raises BadFolder where it is none of ours.
    """
    return SVD if is_single_file(path) else folder.family_of(path)


def is_known(path: Path) -> bool:
    """Return whether a folder or a single file looks like one of a known family, for a loader's list.

    One that cannot be read does not. Loading checks all of it, and says what is wrong.
    """
    with suppress(OSError):
        stat = (path if path.is_file() else path / folder.INDEX).stat()
        return _pipeline(path, stat.st_size, stat.st_mtime_ns) in FAMILIES
    return False


@lru_cache(maxsize=2**14)
def _pipeline(path: Path, _size: int, _modified: int) -> str:
    """Return the diffusers pipeline that a model_index.json names, or a checkpoint holds; "" where it is none.

    It is remembered until the file changes, also of a file that cannot be read.
    """
    with suppress(OSError, ValueError):  # Unreadable and BadFolder among them
        if not is_single_file(path):
            return str(read_json(path, folder.INDEX).get("_class_name", ""))
        texts = header_text(path).decode().split('"')  # names among them. Parsing a hundred headers would take seconds
        return "" if svd_keys.why_not_svd(texts) else SVD.pipeline
    return ""
