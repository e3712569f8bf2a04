"""`onediff-guard compare`: a workflow in several precisions with one seed, as one picture and as numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...trust.message import shown
from ...trust.plain import for_json
from ..comparison import pictures
from ..comparison.frames import as_bytes, compare, difference, read_pngs
from ..comparison.precisions import REFERENCE, SHOWN, Comparable, comparable
from ..errors import HostError, RunFailedError, WorkflowError
from ..files import ensure_writable, temporary_folder, write_together
from ..hosts import chosen as hosts
from ..hosts.result import RunProgress, RunResult, printed_progress
from ..workflow.graph import read_json
from ..workflow.settings import Setting
from .answer import Answer

DEFAULT_PRECISIONS = (REFERENCE, "bf16", "fp16", "fp16 (plain)")
HEADER = ("precision", "plan", "PSNR (dB)", "max error", "seconds", "reruns", "finite frames")
FPS = 8.0  # of the animation
SECONDS_OF = "the denoising steps only, without loading, encoding and decoding"
VERDICTS = {"reference": pictures.NEUTRAL, "finite": pictures.GOOD}  # all others are bad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hosts.add_arguments(parser, output=Path("output") / "compare", results="picture and numbers")
    usual = ",".join(DEFAULT_PRECISIONS)
    words = f"separated by commas; {REFERENCE} is the reference and always included (default: {usual})"
    parser.add_argument("--precisions", type=_precisions, default=DEFAULT_PRECISIONS, metavar="LIST", help=words)


def main(args: argparse.Namespace) -> Answer:
    """Run the workflow in each precision, and write the comparison."""
    outcomes, errors_from = _compare(args)
    facts = {
        "workflow": args.workflow.name,
        "reference": REFERENCE,
        "errors_from": errors_from,
        "seconds_of": SECONDS_OF,
        "runs": [outcome.facts for outcome in outcomes],
    }
    files = _drawn(args.workflow.name, outcomes, f"Errors from {errors_from}; white is 1. Seconds: {SECONDS_OF}.")
    files[".json"] = f"{json.dumps(for_json(facts), indent=2)}\n".encode()
    written = write_together(args.out, "compare", files)
    failed = "\n".join(f"  {each['precision']}: {each['error']}" for each in facts["runs"] if "error" in each)
    error = RunFailedError(f"Not every precision ran. The others are in {written[0]}.\n{failed}") if failed else None
    lines = [*_table(outcomes), f"errors: from {errors_from}; white is 1", f"seconds: {SECONDS_OF}", *written]
    return Answer(lines, {"files": written, **facts}, error)


def _compare(args: argparse.Namespace) -> tuple[list[PrecisionOutcome], str]:
    """Return the outcome of each precision, the reference first, and the source of the frames."""
    workflow = read_json(args.workflow)
    changes = [Setting.parse(change) for change in args.changes]
    with printed_progress(sys.stderr) as on_progress, hosts.opened(args) as host:
        subject = comparable(*host.read(workflow), changes, args.precisions)
        ensure_writable(args.out)

        def run(precision: str) -> tuple[RunResult, np.ndarray]:
            on_progress(RunProgress(f"in {precision}:"))
            with temporary_folder(".compare-", args.out) as folder:
                graph = subject.in_precision(precision)
                result = host.run(graph, output_dir=folder, timeout=args.timeout, on_progress=on_progress)
                return result, _frames(result, subject)

        result, reference = run(REFERENCE)
        outcomes = [PrecisionOutcome.of(REFERENCE, result, reference, reference)]
        for precision in args.precisions[1:]:
            try:
                outcomes.append(PrecisionOutcome.of(precision, *run(precision), reference))
            except (RunFailedError, WorkflowError, HostError) as error:  # noqa: PERF203
                outcomes.append(PrecisionOutcome.failed(precision, str(error)))
    return outcomes, "float frames" if result.results else "8-bit PNG files, whose steps are 1/255"


def _frames(result: RunResult, subject: Comparable) -> np.ndarray:
    """Return float32 [frames, height, width, 3]: the node's output if it ran in this process, else read from files."""
    if made := result.results.get(subject.frames.node):
        return made[subject.frames.slot].float().cpu().numpy()
    return read_pngs(result.files_of(SHOWN))


def _precisions(text: str) -> tuple[str, ...]:
    """Parse a list of precisions. The reference is first; duplicates are removed."""
    given = [name.strip().strip("\"'") for name in text.split(",") if name.strip()]
    precisions = tuple(dict.fromkeys((REFERENCE, *given)))
    if len(precisions) == 1:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected at least one precision to compare with {REFERENCE}, for example fp16,bf16"
        )
    return precisions


@dataclass(frozen=True)
class PrecisionOutcome:
    facts: dict[str, Any]  # for JSON
    row: tuple[str, ...]  # of the table; a failed run has its error in the second cell
    run: pictures.PicturedRun  # without frames if it failed

    @classmethod
    def of(cls, precision: str, result: RunResult, frames: np.ndarray, reference: np.ndarray) -> PrecisionOutcome:
        """Compare a run. frames: float32 [frames, height, width, 3]. Raises RunFailedError if shapes differ."""
        like, stages, count = compare(frames, reference), result.stages(), len(frames)
        seconds = [step["seconds"] for stage in stages for step in stage["steps"] if step["stage"] == "denoiser"]
        failed = _calls(stages, "non-finite", "saturated")
        hidden = like.black if failed and not result.results else 0  # in files, NaN is black
        facts = {
            "precision": precision,
            "plan": _plan(stages),
            "psnr_db": like.psnr,
            "max_error": like.max_error,
            "seconds": sum(seconds),
            "median_step_seconds": float(np.median(seconds)) if seconds else None,
            "total_seconds": result.seconds,  # including loading, and the workflow's other nodes
            "steps": len(seconds),
            "reruns": _calls(stages, "rerun"),
            "calls_not_finite": failed,
            "frames": count,
            "finite_frames": like.finite - hidden,
            "black_frames": like.black,
            "frame_psnr_db": like.frame_psnr,
            "stages": stages,
        }
        psnr = "none" if like.psnr is None else f"{like.psnr:.1f}"
        error = "none" if like.max_error is None else f"{like.max_error:.2g}"
        reruns, finite = str(facts["reruns"]), f"{facts['finite_frames']} of {count}"
        row = (precision, facts["plan"], psnr, error, f"{sum(seconds):.2f}", reruns, finite)
        numbers = "{1}\nPSNR {2} dB, max error {3}\n{4} s, reruns: {5}, frames finite: {6}".format(*row)
        broken = like.frame_psnr.count(None)
        verdict = "reference" if frames is reference else "finite"
        if broken or failed:
            in_steps = "NaN/inf in steps" if _calls(stages, "non-finite") else "clipped in steps"
            verdict = "black" if broken == count else "partly black" if broken else in_steps
        colour, middle = VERDICTS.get(verdict, pictures.BAD), count // 2
        apart = None if frames is reference else difference(frames[middle], reference[middle])
        return cls(facts, row, pictures.PicturedRun(precision, verdict, colour, numbers, as_bytes(frames), apart))

    @classmethod
    def failed(cls, precision: str, error: str) -> PrecisionOutcome:
        row = precision, f"failed: {shown(next(iter(error.splitlines()), ''), 300)}"
        run = pictures.PicturedRun(precision, "failed", pictures.BAD, error, pictures.NO_FRAMES)
        return cls({"precision": precision, "error": error}, row, run)


def _table(outcomes: Sequence[PrecisionOutcome]) -> list[str]:
    rows = [HEADER, *(outcome.row for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows if len(row) == len(HEADER)) for column in range(len(HEADER))]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _drawn(workflow: str, outcomes: Sequence[PrecisionOutcome], footnote: str) -> dict[str, bytes]:
    """Return the pictures, by suffix."""
    runs = [outcome.run for outcome in outcomes]
    frames = len(runs[0].frames)
    which = f"Frame {frames // 2 + 1} of {frames}; below it" if frames > 1 else "Below the picture"
    subheading = f"One seed, {len(runs)} precisions. {which}: its difference from {REFERENCE}."
    picture = pictures.grid(runs, (workflow, subheading, footnote), frame=frames // 2)
    files = {".png": pictures.png(picture)}
    if frames > 1:
        moving = [run for run in runs if len(run.frames)]
        files[".webp"] = pictures.webp(pictures.animation(moving, footnote=f"{workflow}, one seed"), fps=FPS)
    return files


def _plan(stages: Sequence[dict[str, Any]]) -> str:
    """Return a short description of how the denoiser ran."""
    report = next((stage for stage in stages if stage["plan"]["component"] == "denoiser"), None)
    if report is None:
        return "not reported"
    plan = report["plan"]
    if plan["dtype"] == "fp16" and not plan["guarded"]:
        return "fp16, with neither overflow protection nor guard"
    quantised = f"large linear layers in {plan['quantised']}" if plan.get("quantised") else ""
    return ", ".join(filter(None, [plan["dtype"], quantised, report.get("protection")]))


def _calls(stages: Sequence[dict[str, Any]], *outcomes: str) -> int:
    """Return the number of calls, over all stages, with one of these outcomes."""
    every = [each for stage in stages for each in (*stage.get("before", ()), stage)]
    return sum(step["outcome"] in outcomes for stage in every for step in stage["steps"])
