"""Models on disk, whichever way they are stored: folders in diffusers format, and Stable Video Diffusion's one file."""

from __future__ import annotations

from pathlib import Path

from ..errors import BadFolder
from ..families.spec import FamilySpec
from ..families.svd import SVD
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
