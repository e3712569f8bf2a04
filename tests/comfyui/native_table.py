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
WIDE_HEAD = """\
ComfyUI {version}. How far from fp32 the plain run is / the guard's with precision fp16, every layer wide / the guard's
with precision bf16. Distances are norms, as shares of the norm. Weights in bf16 are computed in fp32 by the plain run.

"""
Figures = Mapping[str, Any]


def write(version: str, families: Iterable[str], states: Iterable[str], figures: Mapping[str, Figures]) -> None:
    """figures: by "family, state"; none where the family has no such state."""
    _write(f"native-{version}.md", HEAD.format(version=version) + table(families, states, figures))


def write_wide(version: str, families: Iterable[str], states: Iterable[str], figures: Mapping[str, Figures]) -> None:
    """The same of native_wide_cases.py."""
    _write(f"native-wide-{version}.md", WIDE_HEAD.format(version=version) + table(families, states, figures))


def _write(name: str, text: str) -> None:
    if folder := os.environ.get("ONEDIFF_GUARD_TABLES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(text, encoding="utf-8")


def table(families: Iterable[str], states: Iterable[str], figures: Mapping[str, Figures]) -> str:
    head = ["family", *states]
    rows = [[family, *(_cell(figures.get(f"{family}, {state}")) for state in head[1:])] for family in families]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _cell(figures: Figures | None) -> str:
    if figures is None:
        return "–"
    if figures["error"]:
        return "error"
    if "wide" in figures:
        return " / ".join(_figure(figures[run]) for run in ("plain", "wide", "bf16"))
    if "same" in figures:
        return f"{'same bits' if figures['same'] else 'DIFFERS'}, {_figure(figures['plain'])}"
    return f"{_figure(figures['plain'])} → {_figure(figures['guarded'])}"


def _figure(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.2g}"
