"""What the runs of all families came to, as a Markdown table: `ONEDIFF_GUARD_TABLES=DIR` names where it is written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HEAD = """\
ComfyUI {version}. Healthy: the guarded run has the same bits as the plain one, which is so far from fp32. Overflowing:
the plain run's distance from fp32 → the guarded run's. Distances are the largest, as shares of the largest value.

"""
Figures = Mapping[str, Any]


def write(version: str, families: Iterable[str], states: Iterable[str], figures: Mapping[str, Figures]) -> None:
    """figures: by "family, state"; none where the family has no such state."""
    if folder := os.environ.get("ONEDIFF_GUARD_TABLES"):
        text = HEAD.format(version=version) + table(families, states, figures)
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"native-{version}.md").write_text(text, encoding="utf-8")


def table(families: Iterable[str], states: Iterable[str], figures: Mapping[str, Figures]) -> str:
    head = ["family", *states]
    rows = [[family, *(_cell(figures.get(f"{family}, {state}")) for state in head[1:])] for family in families]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _cell(figures: Figures | None) -> str:
    if figures is None:
        return "–"
    if figures["error"]:
        return "error"
    if "same" in figures:
        return f"{'same bits' if figures['same'] else 'DIFFERS'}, {_figure(figures['plain'])}"
    return f"{_figure(figures['plain'])} → {_figure(figures['guarded'])}"


def _figure(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.2g}"
