"""What a workflow came to in each precision beside the reference: as data, as a table and in pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...trust.plain import for_json
from ...trust.text import shown
from ..hosts.result import RunResult
from . import pictures
from .frames import as_bytes, compare, difference
from .precisions import REFERENCE

HEADER = ("precision", "plan", "PSNR (dB)", "max error", "seconds", "reruns", "finite frames")
FPS = 8.0  # of an animation
SECONDS_OF = "the denoising steps alone, without loading, encoding and decoding"
VERDICTS = {"reference": pictures.NEUTRAL, "finite": pictures.GOOD}  # all others are bad


@dataclass(frozen=True)
class Outcome:
    """What one precision came to."""

    facts: dict[str, Any]  # for JSON
    row: tuple[str, ...]  # of the table; what one that failed says is in its second cell
    run: pictures.Run  # without frames where it failed
    difference: np.ndarray | None = None  # of the middle frame from the reference's, [height, width]; None: it is that

    @classmethod
    def of(cls, precision: str, result: RunResult, frames: np.ndarray, reference: np.ndarray) -> Outcome:
        """frames: float32 [frames, height, width, 3], as the reference's. Raises RunFailedError where they are not."""
        like, stages, count = compare(frames, reference), result.stages(), len(frames)
        steps = [step for stage in stages for step in stage["steps"] if step["stage"] == "denoiser"]
        seconds = [step["seconds"] for step in steps]
        reruns, failed = _calls(stages, "rerun"), _calls(stages, "non-finite", "saturated")
        hidden = like.black if failed and not result.results else 0  # in a file, NaN is black
        plan = _plan(stages)
        facts = {
            "precision": precision,
            "plan": plan,
            "psnr_db": like.psnr,
            "max_error": like.max_error,
            "seconds": sum(seconds),
            "median_step_seconds": float(np.median(seconds)) if seconds else None,
            "total_seconds": result.seconds,  # with loading, and whatever else the workflow does
            "steps": len(steps),
            "reruns": reruns,
            "calls_not_finite": failed,
            "frames": count,
            "finite_frames": like.finite - hidden,
            "black_frames": like.black,
            "frame_psnr_db": like.frame_psnr,
            "stages": stages,
        }
        psnr = "none" if like.psnr is None else f"{like.psnr:.1f}"
        error = "none" if like.max_error is None else f"{like.max_error:.2g}"
        finite = f"{like.finite - hidden} of {count}"
        row = (precision, plan, psnr, error, f"{sum(seconds):.2f}", str(reruns), finite)
        verdict = "reference" if frames is reference else "finite"
        if like.broken or failed:
            verdict = "black" if like.broken == count else "partly black" if like.broken else "not finite"
        numbers = f"{plan}\nPSNR {psnr} dB, max error {error}\n{row[4]} s, reruns: {reruns}, frames finite: {finite}"
        run = pictures.Run(precision, verdict, VERDICTS.get(verdict, pictures.BAD), numbers, as_bytes(frames))
        middle = count // 2
        apart = None if frames is reference else difference(frames[middle], reference[middle])
        return cls(facts, row, run, apart)

    @classmethod
    def failed(cls, precision: str, error: str) -> Outcome:
        row = precision, f"failed: {shown(next(iter(error.splitlines()), ''), 300)}"
        run = pictures.Run(precision, "failed", pictures.BAD, error, pictures.NO_FRAMES)
        return cls({"precision": precision, "error": error}, row, run)


@dataclass(frozen=True)
class Comparison:
    workflow: str  # file name
    outcomes: list[Outcome]  # the reference first
    errors_from: str  # what the frames were read from

    def facts(self) -> dict[str, Any]:
        told = {"workflow": self.workflow, "reference": REFERENCE, "errors_from": self.errors_from}
        return {**told, "seconds_of": SECONDS_OF, "runs": [outcome.facts for outcome in self.outcomes]}

    def table(self) -> list[str]:
        rows = [HEADER, *(outcome.row for outcome in self.outcomes)]
        widths = [max(len(row[column]) for row in rows if len(row) == len(HEADER)) for column in range(len(HEADER))]
        widths[0] = max(len(row[0]) for row in rows)
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return [*lines, f"errors: from {self.errors_from}; white is 1", f"seconds: of {SECONDS_OF}"]

    def files(self) -> dict[str, bytes]:
        """What is written, by suffix."""
        runs = [outcome.run for outcome in self.outcomes]
        frames = len(runs[0].frames)
        which = f"Frame {frames // 2 + 1} of {frames}; below it" if frames > 1 else "Below the picture"
        grid = pictures.grid(
            runs,
            [outcome.difference for outcome in self.outcomes],
            frame=frames // 2,
            heading=self.workflow,
            subheading=f"One seed, {len(runs)} precisions. {which}, where it differs from {REFERENCE}.",
            footnote=f"Errors from {self.errors_from}; white is 1. Seconds of {SECONDS_OF}.",
        )
        files = {".png": pictures.png(grid)}
        if frames > 1:
            moving = [run for run in runs if len(run.frames)]
            animation = pictures.animation(moving, footnote=f"{self.workflow}, one seed")
            files[".webp"] = pictures.webp(animation, fps=FPS)
        return files | {".json": f"{json.dumps(for_json(self.facts()), indent=2)}\n".encode()}


def _plan(stages: Sequence[dict[str, Any]]) -> str:
    """How the denoiser ran, in a few words."""
    report = next((stage for stage in stages if stage["plan"]["component"] == "denoiser"), None)
    if report is None:
        return "not reported"
    plan = report["plan"]
    if plan["dtype"] == "fp16" and not plan["guarded"]:
        return "fp16, neither made safe nor guarded"
    quantised = f"large linear layers in {plan['quantised']}" if plan.get("quantised") else ""
    return ", ".join(filter(None, [plan["dtype"], quantised, report.get("wide")]))


def _calls(stages: Sequence[dict[str, Any]], *outcomes: str) -> int:
    """How many calls of any stage ended so."""
    every = [each for stage in stages for each in (*stage.get("before", ()), stage)]
    return sum(step["outcome"] in outcomes for stage in every for step in stage["steps"])
