"""The files that the demo leaves: pictures of its runs side by side, and a report in numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..headless.errors import OutputError
from .outcome import Outcome

if TYPE_CHECKING:
    from PIL import Image

    from ..headless.comparison.pictures import PicturedRun

FPS = 8.0
STILL_WIDTH = 1200  # px; what a README shows without scaling


def write_pictures(output: Path, outcomes: Sequence[Outcome], footnote: str) -> list[Path]:
    """The runs side by side, as a still and as an animation. The last outcome is the reference."""
    from ..headless.comparison import pictures
    from ..headless.hosts.core_nodes import to_uint8

    reference = outcomes[-1]
    colours = {"black": pictures.BAD, "wrong": pictures.BAD, "right": pictures.GOOD, "reference": pictures.NEUTRAL}
    runs = []
    for outcome in outcomes:
        verdict = outcome.verdict(reference)
        frames = to_uint8(outcome.images.nan_to_num())
        runs.append(
            pictures.PicturedRun(outcome.case.title, verdict, colours[verdict], outcome.numbers(reference), frames)
        )
    picture = still(
        runs,
        heading="CogVideoX in fp16, plain and with overflow protection",
        subheading="One seed and prompt. A block writes 500,000 into the residual stream, and in the third run a layer "
        "inside it overflows too; fp16 ends at 65,504.",
        footnote=footnote,
    )
    moving = pictures.webp(pictures.animation(runs, footnote=footnote), fps=FPS)
    return [
        write(output / "side-by-side.png", pictures.png(picture)),
        write(output / "side-by-side.webp", moving),
    ]


def still(
    runs: Sequence[PicturedRun], *, heading: str, subheading: str, footnote: str, columns: int = 5
) -> Image.Image:
    """One row for each run: a line about it, and `columns` frames spread evenly over its video."""
    from ..headless.comparison import pictures

    width = (STILL_WIDTH - 2 * pictures.MARGIN - (columns - 1) * pictures.GAP) // columns
    height = runs[0].height(width)
    row = pictures.LABEL + height + 18
    page = pictures.Page(STILL_WIDTH, pictures.HEAD + len(runs) * row + pictures.FOOT)
    page.head(heading, subheading, footnote)
    for number, run in enumerate(runs):
        top = pictures.HEAD + number * row
        page.label(pictures.MARGIN, top + pictures.LABEL // 2, run)
        page.write(STILL_WIDTH - pictures.MARGIN, top + pictures.LABEL // 2, run.numbers, 15, anchor="rm")
        chosen = np.linspace(0, len(run.frames) - 1, columns).round().astype(int)
        for column, frame in enumerate(run.frames[chosen]):
            x = pictures.MARGIN + column * (width + pictures.GAP)
            page.show(x, top + pictures.LABEL, frame, width, height)
    return page.image


def write_report(output: Path, outcomes: Sequence[Outcome], note: str, made: Mapping[str, Any]) -> Path:
    """made: what all runs were asked for."""
    reference = outcomes[-1]
    report = {
        "note": note,
        **made,
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers", "onediff")}
        | {"python": platform.python_version()},
        "runs": [
            {
                "run": outcome.case.title,
                "precision": outcome.case.precision,
                "video": outcome.video.name,
                "seconds": round(outcome.seconds, 2),
                "frames": len(outcome.images),
                "frames_not_finite": outcome.broken_frames,
                "steps": len(outcome.steps),
                "steps_not_finite": outcome.count("non-finite", "saturated"),
                "steps_rerun_in_fp32": outcome.count("rerun"),
                "max_difference_from_fp32": outcome.difference(reference),
                "stages": outcome.stages,
            }
            for outcome in outcomes
        ],
    }
    strict = json.loads(json.dumps(report, default=str), parse_constant=str)  # JSON has no NaN: "NaN"
    return write(output / "report.json", (json.dumps(strict, indent=2) + "\n").encode())


def write(path: Path, data: bytes) -> Path:
    """Write a file whole, over an earlier one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raises OutputError where the block could not write to `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"Cannot write {path}: {reason}. Free space, or choose another folder with --out.") from error
