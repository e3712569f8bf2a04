"""Where OneFlow's graphs outlast the process. OneDiff reads and writes them, a file for each block and size."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from ...precision.policy import Plan
from ..atomic_files import drop_oldest, limit_here
from ..insight.machine import version_of
from ..run.handle import PipelineHandle
from ..run.profiles import identify

logger = logging.getLogger(__name__)

FOLDER = "oneflow"


def graphs_folder(handle: PipelineHandle, denoiser: str, plan: Plan, *, wide: bool) -> Path | None:
    """For the graphs of a denoiser; None where none are kept.

    Another one for other weights or LoRAs (a graph may hold them), dtype, stream, options, card or version of OneFlow.
    Folders of the same cache that were not used longest are dropped beyond its limit, which both kinds have each.
    wide: the residual stream is float32.
    """
    limit = limit_here(logger.warning)
    if handle.compiled is None or not limit or handle.backend.name != "oneflow":
        return None
    known = identify(handle.store.model, denoiser, handle.loras_of(denoiser), handle.architecture.name, plan.dtype)
    options = handle.compile_options.in_words("oneflow")
    facts = (known.text(), wide, plan.accumulation, options, version_of("oneflow"))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    folder = handle.compiled / FOLDER / f"{known.model}-{known.architecture}-{known.dtype}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        drop_oldest(folder.parent.iterdir(), folder, limit)
    except OSError as error:
        logger.warning("OneFlow's graphs are not kept in %s: %s", folder, error)
        return None
    return folder
