"""What was measured on this machine, as JSON beside the compiled code: read strictly, written whole. Nothing here can
fail a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..trust import foreign
from ..trust.atomic_files import limit_here, replacing
from ..trust.foreign import Foreign, Unreadable

logger = logging.getLogger(__name__)

_File = TypeVar("_File", bound=Foreign)


def kept_in(folder: Path | None, name: str) -> Path | None:
    """Return the file of that name; None where nothing is kept, as the user may want it."""
    return folder / name if folder and limit_here(lambda _: None) else None


def read(file: Path | None, kind: type[_File], limit: int) -> _File | None:
    """Return what earlier processes measured; None where that is nothing, or cannot be read, so that it is measured
    anew.

    limit: of the file, in bytes.
    """
    try:
        return foreign.fitting(kind, foreign.read(file, limit=limit)) if file and file.is_file() else None
    except (OSError, Unreadable) as error:
        left_alone(file, error)
        return None


def left_alone(file: Path | None, why: object) -> None:
    logger.warning("'%s' is left alone, and measured anew: %s", file, why)


def write(file: Path | None, facts: Mapping[str, Any]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            stream.write(json.dumps(facts).encode())
    except OSError as error:
        logger.warning("what this run took could not be kept in '%s': %s", file, error)
