"""What nodes that run a model have in common."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import host
from .inputs import INHERIT

if TYPE_CHECKING:
    from ..pipelines.handle import PipelineHandle
    from ..precision.policy import Precision
    from ..precision.report import RunReport


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


def ui(report: RunReport) -> dict[str, list[Any]]:
    """What the node shows, and what programs read from the history."""
    return {"text": [report.summary()], "onediff_guard": [report.as_dict()]}
