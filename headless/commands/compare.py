"""`onediff-guard compare`: a workflow in several precisions with one seed, in one picture and in numbers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from ..comparison.frames import read_pngs
from ..comparison.precisions import REFERENCE, SHOWN, Comparable, comparable
from ..comparison.results import Comparison, Outcome
from ..errors import HostError, RunFailedError, WorkflowError
from ..files import ensure_writable, write_together
from ..hosts import chosen as hosts
from ..hosts.result import Progress, RunResult
from ..progress import ProgressPrinter
from ..scratch import temporary_folder
from ..workflow.graph import read_json
from ..workflow.settings import Setting
from . import answer

DEFAULT_OUTPUT = Path("output") / "compare"
DEFAULT_PRECISIONS = (REFERENCE, "bf16", "fp16", "fp16 (plain)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hosts.add_arguments(parser, output=DEFAULT_OUTPUT, results="picture and numbers")
    parser.add_argument(
        "--precisions",
        type=_precisions,
        default=DEFAULT_PRECISIONS,
        metavar="LIST",
        help=f"with commas between them; {REFERENCE} is the reference, and added (default: "
        f"{','.join(DEFAULT_PRECISIONS)})",
    )


def main(args: argparse.Namespace) -> int:
    """Run the workflow in each precision, write and print how they compare; the exit code."""
    with answer.errors_told(args.json):
        comparison = _compare(args)
        files = write_together(args.out, "compare", comparison.files())
    failed = [outcome.facts for outcome in comparison.outcomes if "error" in outcome.facts]
    told = "\n".join(f"  {each['precision']}: {each['error']}" for each in failed)
    error = RunFailedError(f"Not every precision ran. The others are in {files[0]}.\n{told}") if failed else None
    if not args.json:
        for line in [*comparison.table(), *map(str, files)]:
            print(line)
    elif error:
        answer.failed(error, files=files, **comparison.facts())
    else:
        answer.done(files=files, **comparison.facts())
    if error:
        raise error
    return 0


def _compare(args: argparse.Namespace) -> Comparison:
    workflow = read_json(args.workflow)
    changes = [Setting.parse(change) for change in args.changes]
    with ProgressPrinter(sys.stderr) as on_progress, hosts.opened(args) as host:
        subject = comparable(*host.read(workflow), changes, args.precisions)
        ensure_writable(args.out)

        def run(precision: str) -> tuple[RunResult, np.ndarray]:
            on_progress(Progress(f"in {precision}:"))
            with temporary_folder(".compare-", args.out) as folder:
                graph = subject.in_precision(precision)
                result = host.run(graph, output_dir=folder, timeout=args.timeout, on_progress=on_progress)
                return result, _frames(result, subject)

        result, reference = run(REFERENCE)
        outcomes = [Outcome.of(REFERENCE, result, reference, reference)]
        for precision in args.precisions[1:]:
            try:
                outcomes.append(Outcome.of(precision, *run(precision), reference))
            except (RunFailedError, WorkflowError, HostError) as error:  # noqa: PERF203
                outcomes.append(Outcome.failed(precision, str(error)))
    errors_from = "float frames" if result.results else "8-bit PNG files, whose steps are 1/255"
    return Comparison(args.workflow.name, outcomes, errors_from)


def _frames(result: RunResult, subject: Comparable) -> np.ndarray:
    """float32 [frames, height, width, 3]: as the node made them where that was in this process, else from files."""
    if made := result.results.get(subject.frames.node):
        return made[subject.frames.slot].float().cpu().numpy()
    return read_pngs(result.files_of(SHOWN))


def _precisions(text: str) -> tuple[str, ...]:
    """The reference first, each once."""
    given = [name.strip().strip("\"'") for name in text.split(",") if name.strip()]
    precisions = tuple(dict.fromkeys((REFERENCE, *given)))
    if len(precisions) == 1:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected at least one precision to compare with {REFERENCE}, for example fp16,bf16"
        )
    return precisions
