"""What the nodes that run a stage of a model have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..comfyui_host.language import translated
from ..trust.message import joined
from .inputs import INHERIT

if TYPE_CHECKING:
    import torch

    from ..pipelines.run.handle import PipelineHandle
    from ..precision.policy import Precision
    from ..precision.report import RunReport


logger = logging.getLogger(__name__)


def requested(precision: str) -> Precision | None:
    """The drop-down's value → Precision; None for 'inherit'."""
    from ..precision.policy import Precision

    return None if precision == INHERIT else Precision(precision)


def embeddings(conditioning: list[Any] | None) -> torch.Tensor | None:
    """Return what Encode Prompt put on a CONDITIONING wire: [1, tokens, channels]; None where nothing is wired."""
    from ..comfyui_host.labelled import plain

    return plain(conditioning[0][0]) if conditioning else None


@contextmanager
def running(pipeline: PipelineHandle) -> Generator[None]:
    """Give back what an interrupted or failed stage left on the device."""
    try:
        yield
    except BaseException:
        host.release_cached_memory(pipeline.store.placement.device)
        raise
    host.linger(pipeline.store)


def counted(progress: host.Progress) -> Callable[[int, int, str], None]:
    """What stages tell of their calls, on the node."""
    return lambda done, total, text: progress.update(done, text, total)


def ui(report: RunReport, node_id: str | None, *more: str) -> dict[str, list[Any]]:
    """Say on the node how it ran, and `more` on lines of their own; returns what programs read from the history."""
    for warning in report.warnings:
        logger.warning("%s", warning)
    lines = filter(None, (report.summary(), report.finding(), *report.warnings, *more))
    text = translated(joined("\n", lines))
    host.say(node_id, text)
    return {"text": [text], "onediff_guard": [report.as_dict()]}
