"""Where OneFlow's graphs outlast the process. OneDiff reads and writes them, a file for each block and size."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from ...precision.machine import version_of
from ...precision.profile_store import Profile
from ...trust.atomic_files import drop_oldest, limit_here
from ...trust.owners import why_unsafe_below
from .backends import CompileOptions

logger = logging.getLogger(__name__)

FOLDER = "oneflow"


def graphs_folder(
    kept: Path, weights: Profile, options: CompileOptions, accumulation: str, *, wide: bool
) -> Path | None:
    """For the graphs of a denoiser; None where none are kept.

    Another one for other weights or LoRAs (a graph may hold them), dtype, stream, options, card or version of OneFlow.
    Folders of the same cache that were not used longest are dropped beyond its limit, which both kinds have each.
    kept: of all compiled code. weights: which model's, with its LoRAs, on which card, as profiles name them.
    wide: the residual stream is float32.
    """
    limit = limit_here(logger.warning)
    if not limit:
        return None
    facts = (weights.text(), wide, accumulation, options.in_words("oneflow"), version_of("oneflow"))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    folder = kept / FOLDER / f"{weights.model}-{weights.architecture}-{weights.dtype}-{digest}"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if why := why_unsafe_below(folder):
            raise PermissionError(None, f"another user could have written there: {why}")
        os.utime(folder)
        drop_oldest(folder.parent.iterdir(), folder, limit)
    except OSError as error:
        logger.warning("OneFlow's graphs are not kept in %s: %s", folder, error)
        return None
    return folder
