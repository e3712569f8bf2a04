"""Where OneFlow's graphs outlast the process. OneDiff reads and writes them, a file for each block and size."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ..precision.policy import Plan
from .compile_cache import DEFAULT_LIMIT, limit_of
from .handle import PipelineHandle
from .machine import version_of
from .profiles import identify

logger = logging.getLogger(__name__)

FOLDER = "oneflow"


def graphs_folder(handle: PipelineHandle, plan: Plan, bits: int) -> Path | None:
    """For the graphs of a denoiser; None where none are kept.

    Another one for other weights or LoRAs (a graph may hold them), dtype, fold, options, card or version of OneFlow.
    Folders of the same cache that were not used longest are dropped beyond its limit, which both kinds have each.
    bits: of the fold.
    """
    try:
        limit = limit_of(os.environ)
    except ValueError:
        limit = DEFAULT_LIMIT
    if handle.compiled is None or not limit or handle.backend.name != "oneflow":
        return None
    known = identify(handle.store.model, handle.loras, handle.architecture.name, plan.dtype)
    options = handle.compile_options.in_words("oneflow")
    facts = (known.text(), bits, plan.accumulation, options, version_of("oneflow"))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    folder = handle.compiled / FOLDER / f"{known.model}-{known.architecture}-{known.dtype}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        _drop_oldest(folder, limit)
    except OSError as error:
        logger.warning("OneFlow's graphs are not kept in %s: %s", folder, error)
        return None
    return folder


def _drop_oldest(used: Path, limit: float) -> None:
    left = limit * 1e9
    for folder in sorted(used.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True):
        with suppress(OSError):
            left -= sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if left < 0 and folder != used:
                logger.info("more than %g GB of OneFlow's graphs: dropping %s", limit, folder.name)
                shutil.rmtree(folder)
