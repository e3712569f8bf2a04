"""What the nodes that run a stage of a model have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from .inputs import INHERIT

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle
    from ..precision.policy import Precision
    from ..precision.report import RunReport


logger = logging.getLogger(__name__)


def requested(precision: str) -> Precision | None:
    """The drop-down's value → Precision; None for 'inherit'."""
    from ..precision.policy import Precision

    return None if precision == INHERIT else Precision(precision)


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
    text = "\n".join((report.summary(), *report.warnings, *more))
    host.say(node_id, text)
    return {"text": [text], "onediff_guard": [report.as_dict()]}
