"""How many graphs a run compiled, and how many of them an earlier process had compiled for it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...precision.report import RunReport


def graphs_compiled() -> int:
    """By dynamo, in this process so far. OneFlow compiles without it."""
    counters = _counters()
    return counters["stats"]["unique_graphs"] if counters else 0


def graphs_from_cache() -> int:
    """Those whose code inductor found instead of compiling it, in this process so far."""
    counters = _counters()
    if not counters:
        return 0
    return max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])


@contextmanager
def counted(report: RunReport) -> Generator[None]:
    """Count what a run compiles, for its report."""
    graphs, from_cache = graphs_compiled(), graphs_from_cache()
    try:
        yield
    finally:
        report.graphs = None if report.backend in ("eager", "oneflow") else graphs_compiled() - graphs
        report.graphs_kept = min(graphs_from_cache() - from_cache, report.graphs or 0)


def _counters() -> Any:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo and dynamo.counters
