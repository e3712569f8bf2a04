"""Estimate what offload 'auto' chooses for each published model on cards of many sizes, and the memory peak.

    python scripts/benchmarks/cards.py [--arch sm86] [--out scripts/benchmarks/results]

`onediff-guard doctor --vram` makes the same estimate for one card. This prints the table of docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby

import diffusers
from comfyui_onediff_guard.pipelines.insight.vram_estimate import RunEstimate, StageEstimate, estimate_runs
from comfyui_onediff_guard.pipelines.run.feature import APART
from comfyui_onediff_guard.precision.arch import named
from measure import head, new_parser, write_json

GIBIBYTES = (6, 8, 10, 12, 16, 24, 32, 48, 80)
SHORT = {"none": "n", "group": "g", "sequential": "s", APART: "½", "whole": "w", "tiling": "t"}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--arch", default="sm86", help="architecture of the cards")
    args = parser.parse_args()
    runs = []
    print(f"| | {' | '.join(map(str, GIBIBYTES))} |\n|{'---|' * (len(GIBIBYTES) + 1)}", flush=True)
    memories = [gibibytes * 2**30 for gibibytes in GIBIBYTES]
    for _, of_one in groupby(estimate_runs(None, named(args.arch), memories), lambda run: run.variant):
        row = [*of_one]
        print(line(row), flush=True)
        runs += row
    result = head("cards", "none: counted, not run", diffusers=diffusers.__version__, architecture=args.arch)
    result["runs"] = [asdict(run) for run in runs]
    print(f"written to {write_json(result, args.out, 'paper')}")


def line(row: Iterable[RunEstimate]) -> str:
    """Return a row of the table, with a cell per card."""
    first, *_ = runs = [*row]
    width, height, frames = first.size
    size = f"{width}×{height}{f', {frames} frames' if frames > 1 else ''}"
    return f"| {first.variant}, {size} | {' | '.join(map(cell, runs))} |"


def cell(run: RunEstimate) -> str:
    """Return how each stage runs, and the highest peak in GB."""
    peak = max(stage.weights + stage.beside for stage in run.stages)
    return f"{' '.join(map(code, run.stages))}: {peak / 1e9:.1f}"


def code(stage: StageEstimate) -> str:
    if not stage.fits:
        return "–"
    return "".join(SHORT.get(word, word.partition(" ")[0]) for word in stage.way.split(", "))


if __name__ == "__main__":
    main()
