"""Draw docs/icon.png and docs/banner.png, the pack's pictures in the Comfy Registry.

    python scripts/registry_pictures.py

The icon is the strip of a run with steps in half precision and a recomputed one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline

DOCS = Path(__file__).resolve().parents[1] / "docs"
NIGHT, PAPER, HALF, RERUN = "#14181f", "#f4f1ea", "#3fa37c", "#e7a33e"
SHIELD = [(0, 1), (0.78, 0.74), (0.78, 0.08), (0.62, -0.52), (0, -1)]  # its right half, from the top
CELLS = "HHHR"


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure of this size in units of 100 pixels, and axes over all of it in the same units."""
    figure = Figure(figsize=(width, height), dpi=100, facecolor=NIGHT)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def shield(axes: Any, x: float, y: float, size: float) -> None:
    corners = [*SHIELD, *[(-across, up) for across, up in reversed(SHIELD[1:-1])]]
    points = [(x + across * size, y + up * size) for across, up in corners]
    axes.add_patch(
        PathPatch(
            Outline([*points, points[0]], closed=True), facecolor="none", edgecolor=PAPER, lw=9, joinstyle="round"
        )
    )
    side = size * 0.3
    for n, cell in enumerate(CELLS):
        left = x - side * 1.12 + (n % 2) * side * 1.24
        bottom = y + side * 0.22 - (n // 2) * side * 1.24
        colour = RERUN if cell == "R" else HALF
        axes.add_patch(
            FancyBboxPatch(
                (left, bottom), side, side, boxstyle=f"round,pad=0,rounding_size={side / 5}", fc=colour, ec="none"
            )
        )
        sign = "32" if cell == "R" else "16"
        axes.text(
            left + side / 2,
            bottom + side / 2,
            sign,
            color=NIGHT,
            ha="center",
            va="center",
            weight="bold",
            size=side * 42,
        )


def icon() -> Figure:
    figure, axes = canvas(4, 4)
    shield(axes, 2, 2, 1.7)
    return figure


def banner() -> Figure:
    figure, axes = canvas(12.6, 5.4)
    shield(axes, 2.6, 2.7, 1.8)
    axes.text(5.1, 3.25, "OneDiff Guard", color=PAPER, size=58, weight="bold", va="center")
    axes.text(
        5.13,
        2.3,
        "Diffusion models in fp16\nthat never come out black.",
        color=PAPER,
        size=27,
        va="center",
        linespacing=1.35,
    )
    return figure


if __name__ == "__main__":
    mpl.rcParams["font.family"] = "DejaVu Sans"
    for name, draw in (("icon", icon), ("banner", banner)):
        draw().savefig(DOCS / f"{name}.png", facecolor=NIGHT)
