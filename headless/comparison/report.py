"""How precisions compare, as data, as a table and in pictures."""

from __future__ import annotations

import json
import math
from statistics import median
from typing import Any

from ...trust.plain import for_json
from ...trust.text import shown
from . import pictures
from .outcome import Comparison, Failed, Outcome
from .precisions import REFERENCE

HEADER = ("precision", "plan", "PSNR (dB)", "max error", "seconds", "reruns", "finite frames")
SECONDS_OF = "the denoising steps alone, without loading, encoding and decoding"


def facts_of(comparison: Comparison) -> dict[str, Any]:
    return {
        "workflow": comparison.workflow,
        "reference": REFERENCE,
        "errors_from": comparison.errors_from,
        "seconds_of": SECONDS_OF,
        "runs": [
            {"precision": outcome.precision, "error": outcome.error}
            if isinstance(outcome, Failed)
            else {
                "precision": outcome.precision,
                "plan": outcome.plan,
                "psnr_db": outcome.likeness.psnr,
                "max_error": outcome.likeness.max_error,
                "seconds": outcome.seconds,
                "median_step_seconds": median(step["seconds"] for step in outcome.steps) if outcome.steps else None,
                "total_seconds": outcome.total_seconds,
                "steps": len(outcome.steps),
                "reruns": outcome.reruns,
                "calls_not_finite": outcome.failed,
                "frames": len(outcome.frames),
                "finite_frames": outcome.finite,
                "black_frames": outcome.likeness.black,
                "frame_psnr_db": outcome.likeness.frame_psnr,
                "stages": outcome.stages,
            }
            for outcome in comparison.outcomes
        ],
    }


def table(comparison: Comparison) -> list[str]:
    rows = [HEADER, *map(_row, comparison.outcomes)]
    widths = [max(len(row[column]) for row in rows if len(row) == len(HEADER)) for column in range(len(HEADER))]
    widths[0] = max(len(row[0]) for row in rows)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return [*lines, f"errors: from {comparison.errors_from}; white is 1", f"seconds: of {SECONDS_OF}"]


def _row(outcome: Outcome | Failed) -> tuple[str, ...]:
    if isinstance(outcome, Failed):
        return outcome.precision, f"failed: {shown(next(iter(outcome.error.splitlines()), ''), 300)}"
    like = outcome.likeness
    return (
        outcome.precision,
        outcome.plan,
        "none" if like.psnr is None else f"{like.psnr:.1f}",
        "none" if like.max_error is None else f"{like.max_error:.2g}",
        f"{outcome.seconds:.2f}",
        str(outcome.reruns),
        f"{outcome.finite} of {len(outcome.frames)}",
    )


def contents(comparison: Comparison, facts: dict[str, Any]) -> dict[str, bytes]:
    """What is written, by suffix."""
    drawn = [_drawn(outcome) for outcome in comparison.outcomes]
    first, middle = comparison.runs[0], comparison.middle
    which = f"Frame {middle + 1} of {len(first.frames)}; below it" if len(first.frames) > 1 else "Below the picture"
    footnote = f"Errors from {comparison.errors_from}; white is 1. Seconds of {SECONDS_OF}."
    grid = pictures.grid(
        drawn,
        [outcome.difference if isinstance(outcome, Outcome) else None for outcome in comparison.outcomes],
        frame=middle,
        heading=comparison.workflow,
        subheading=f"One seed, {len(drawn)} precisions. {which}, where it differs from {REFERENCE}.",
        footnote=footnote,
    )
    files = {".png": pictures.png(grid)}
    if len(first.frames) > 1:
        moving = [run for run in drawn if len(run.frames)]
        animation = pictures.animation(moving, footnote=f"{comparison.workflow}, one seed")
        files[".webp"] = pictures.webp(animation, fps=comparison.fps)
    return files | {".json": f"{json.dumps(for_json(facts), indent=2)}\n".encode()}


def _drawn(outcome: Outcome | Failed) -> pictures.Run:
    if isinstance(outcome, Failed):
        return pictures.Run(outcome.precision, "failed", pictures.BAD, outcome.error, pictures.NO_FRAMES)
    verdict, colour = _verdict(outcome)
    counts = f"{outcome.seconds:.2f} s, {outcome.reruns} rerun{'' if outcome.reruns == 1 else 's'}"
    numbers = "\n".join((outcome.plan, _nearness(outcome), counts))
    return pictures.Run(outcome.precision, verdict, colour, numbers, outcome.frames)


def _verdict(outcome: Outcome) -> tuple[str, pictures.Colour]:
    if outcome.likeness.broken == len(outcome.frames):
        return "black", pictures.BAD
    if outcome.likeness.broken:
        return "partly black", pictures.BAD
    if outcome.failed:
        return "not finite", pictures.BAD
    if outcome.difference is None:
        return "reference", pictures.NEUTRAL
    return "finite", pictures.GOOD


def _nearness(outcome: Outcome) -> str:
    """To the reference, for the picture."""
    like, frames = outcome.likeness, len(outcome.frames)
    if outcome.difference is None:
        return f"{outcome.finite} of {frames} frames finite"
    if like.psnr is None or like.max_error is None:
        missing = frames - outcome.finite
        return f"{missing} of {frames} frames NaN" if missing else f"{like.black} of {frames} frames black"
    if math.isinf(like.psnr):
        return f"equal to {REFERENCE}"
    return f"PSNR {like.psnr:.1f} dB, max error {like.max_error:.2g}"
