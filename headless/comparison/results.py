"""What a workflow came to in each precision beside the reference: as data, as a table and in pictures."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...trust.plain import for_json
from ...trust.text import shown
from . import pictures
from .frames import Likeness
from .precisions import REFERENCE

HEADER = ("precision", "plan", "PSNR (dB)", "max error", "seconds", "reruns", "finite frames")
SECONDS_OF = "the denoising steps alone, without loading, encoding and decoding"


@dataclass(frozen=True)
class Outcome:
    """What one precision came to."""

    precision: str
    stages: list[dict[str, Any]]  # the nodes' reports
    total_seconds: float  # with loading, and whatever else the workflow does
    frames: np.ndarray = field(repr=False)  # uint8 [frames, height, width, 3]
    difference: np.ndarray | None = field(repr=False)  # of the middle frame from the reference's, [height, width]
    likeness: Likeness
    from_files: bool  # where NaN is black

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for stage in self.stages for step in stage["steps"] if step["stage"] == "denoiser"]

    @property
    def seconds(self) -> float:
        return sum(step["seconds"] for step in self.steps)

    @property
    def reruns(self) -> int:
        return self._count("rerun")

    @property
    def failed(self) -> int:
        """Calls of any stage whose result stayed broken."""
        return self._count("non-finite", "saturated")

    @property
    def finite(self) -> int:
        """Frames without NaN. In a file those are black: the reports tell them from what is meant to be black."""
        hidden = self.likeness.black if self.from_files and self.failed else 0
        return self.likeness.finite - hidden

    @property
    def plan(self) -> str:
        """How the denoiser ran, in a few words."""
        report = next((stage for stage in self.stages if stage["plan"]["component"] == "denoiser"), None)
        if report is None:
            return "not reported"
        plan, learned = report["plan"], report.get("learned") or {}
        if plan["dtype"] == "fp16" and not plan["guarded"]:
            return "fp16, neither made safe nor guarded"
        parts = [*(learned.get("wide_parts") or ()), *(learned.get("islands") or ())]
        words = [
            plan["dtype"],
            f"large linear layers in {plan['quantised']}" if plan.get("quantised") else "",
            report.get("wide") or "",
            f"{len(parts)} block{'s' * (len(parts) > 1)} wide or in fp32" if parts else "",
            "then fp32" if learned.get("whole_run_fp32") else "",
        ]
        return ", ".join(filter(None, words))

    def facts(self) -> dict[str, Any]:
        seconds = [step["seconds"] for step in self.steps]
        return {
            "precision": self.precision,
            "plan": self.plan,
            "psnr_db": self.likeness.psnr,
            "max_error": self.likeness.max_error,
            "seconds": self.seconds,
            "median_step_seconds": float(np.median(seconds)) if seconds else None,
            "total_seconds": self.total_seconds,
            "steps": len(seconds),
            "reruns": self.reruns,
            "calls_not_finite": self.failed,
            "frames": len(self.frames),
            "finite_frames": self.finite,
            "black_frames": self.likeness.black,
            "frame_psnr_db": self.likeness.frame_psnr,
            "stages": self.stages,
        }

    def row(self) -> tuple[str, ...]:
        psnr, error = self.likeness.psnr, self.likeness.max_error
        return (
            self.precision,
            self.plan,
            "none" if psnr is None else f"{psnr:.1f}",
            "none" if error is None else f"{error:.2g}",
            f"{self.seconds:.2f}",
            str(self.reruns),
            f"{self.finite} of {len(self.frames)}",
        )

    def drawn(self) -> pictures.Run:
        verdict, colour = self._verdict()
        counts = f"{self.seconds:.2f} s, {self.reruns} rerun{'' if self.reruns == 1 else 's'}"
        numbers = "\n".join((self.plan, self._nearness(), counts))
        return pictures.Run(self.precision, verdict, colour, numbers, self.frames)

    def _verdict(self) -> tuple[str, pictures.Colour]:
        if broken := self.likeness.broken:
            return "black" if broken == len(self.frames) else "partly black", pictures.BAD
        if self.failed:
            return "not finite", pictures.BAD
        return ("reference", pictures.NEUTRAL) if self.difference is None else ("finite", pictures.GOOD)

    def _nearness(self) -> str:
        """To the reference, for the picture."""
        like, frames = self.likeness, len(self.frames)
        if self.difference is None:
            return f"{self.finite} of {frames} frames finite"
        if like.psnr is None or like.max_error is None:
            missing = frames - self.finite
            return f"{missing} of {frames} frames NaN" if missing else f"{like.black} of {frames} frames black"
        return (
            f"equal to {REFERENCE}"
            if math.isinf(like.psnr)
            else f"PSNR {like.psnr:.1f} dB, max error {like.max_error:.2g}"
        )

    def _count(self, *outcomes: str) -> int:
        stages = [each for stage in self.stages for each in (*stage.get("before", ()), stage)]
        return sum(step["outcome"] in outcomes for stage in stages for step in stage["steps"])


@dataclass(frozen=True)
class Failed:
    """A precision that raised."""

    precision: str
    error: str

    def facts(self) -> dict[str, Any]:
        return {"precision": self.precision, "error": self.error}

    def row(self) -> tuple[str, ...]:
        return self.precision, f"failed: {shown(next(iter(self.error.splitlines()), ''), 300)}"

    def drawn(self) -> pictures.Run:
        return pictures.Run(self.precision, "failed", pictures.BAD, self.error, pictures.NO_FRAMES)


@dataclass(frozen=True)
class Comparison:
    workflow: str  # file name
    outcomes: list[Outcome | Failed]  # the reference first
    fps: float

    @property
    def reference(self) -> Outcome:
        assert isinstance(self.outcomes[0], Outcome)
        return self.outcomes[0]

    @property
    def errors_from(self) -> str:
        return "8-bit PNG files, whose steps are 1/255" if self.reference.from_files else "float frames"

    def facts(self) -> dict[str, Any]:
        return {
            "workflow": self.workflow,
            "reference": REFERENCE,
            "errors_from": self.errors_from,
            "seconds_of": SECONDS_OF,
            "runs": [outcome.facts() for outcome in self.outcomes],
        }

    def table(self) -> list[str]:
        rows = [HEADER, *(outcome.row() for outcome in self.outcomes)]
        widths = [max(len(row[column]) for row in rows if len(row) == len(HEADER)) for column in range(len(HEADER))]
        widths[0] = max(len(row[0]) for row in rows)
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return [*lines, f"errors: from {self.errors_from}; white is 1", f"seconds: of {SECONDS_OF}"]

    def files(self) -> dict[str, bytes]:
        """What is written, by suffix."""
        drawn, frames = [outcome.drawn() for outcome in self.outcomes], len(self.reference.frames)
        middle = frames // 2
        which = f"Frame {middle + 1} of {frames}; below it" if frames > 1 else "Below the picture"
        grid = pictures.grid(
            drawn,
            [outcome.difference if isinstance(outcome, Outcome) else None for outcome in self.outcomes],
            frame=middle,
            heading=self.workflow,
            subheading=f"One seed, {len(drawn)} precisions. {which}, where it differs from {REFERENCE}.",
            footnote=f"Errors from {self.errors_from}; white is 1. Seconds of {SECONDS_OF}.",
        )
        files = {".png": pictures.png(grid)}
        if frames > 1:
            moving = [run for run in drawn if len(run.frames)]
            animation = pictures.animation(moving, footnote=f"{self.workflow}, one seed")
            files[".webp"] = pictures.webp(animation, fps=self.fps)
        return files | {".json": f"{json.dumps(for_json(self.facts()), indent=2)}\n".encode()}
