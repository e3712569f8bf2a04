"""`onediff-guard run`: arguments in, a host chosen, files and summary out."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from . import answer
from .errors import HeadlessError, InterruptedRunError, WorkflowError
from .graph import read_json
from .progress import ProgressPrinter
from .result import RunResult
from .settings import Setting

DEFAULT_OUTPUT = Path("output")
DEFAULT_INPUT = Path("input")
DEFAULT_MODELS = Path("models")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workflow", type=Path, metavar="WORKFLOW.json", help="a workflow, in API or in UI format")
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="NODE.INPUT=VALUE",
        help="set an input; NODE is an id, or a title or class id that is unique; may be repeated",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="results (default: output)")
    parser.add_argument(
        "--models",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="models, laid out as ComfyUI's folder or simply side by side (default: models); may be repeated",
    )
    parser.add_argument("--input", type=Path, metavar="DIR", help="images that LoadImage reads (default: input)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    host = parser.add_mutually_exclusive_group()
    host.add_argument("--server", metavar="URL", help="run on this ComfyUI, for example http://127.0.0.1:8188")
    host.add_argument("--comfyui", type=Path, metavar="DIR", help="start this ComfyUI checkout, run there, stop it")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="stop the run after this many seconds")


def main(args: argparse.Namespace) -> int:
    """Run the workflow and print what came of it; the exit code."""
    try:
        try:
            result = _run(args)
        except KeyboardInterrupt as error:
            raise InterruptedRunError("Interrupted.") from error
    except HeadlessError as error:
        if args.json:
            answer.failed(error)
        raise
    if args.json:
        answer.done(files=result.files, outputs=result.outputs, seconds=round(result.seconds, 3))
    else:
        for line in [*map(str, result.files), *result.summaries()]:
            print(line)
    return 0


def _run(args: argparse.Namespace) -> RunResult:
    workflow = read_json(args.workflow)
    changes = [Setting.parse(change) for change in args.changes]
    with ProgressPrinter(sys.stderr) as on_progress:
        if args.server:
            if args.models:
                raise WorkflowError("--models has no meaning with --server: the server has its own model folders.")
            from .follow import run_on_server

            return run_on_server(
                workflow,
                url=args.server,
                output_dir=args.out,
                input_dir=args.input,
                changes=changes,
                timeout=args.timeout,
                on_progress=on_progress,
            )
        if args.comfyui:
            from .checkout import run_in_checkout

            return run_in_checkout(
                workflow,
                checkout=args.comfyui,
                output_dir=args.out,
                models=args.models,
                input_dir=args.input,
                changes=changes,
                timeout=args.timeout,
                on_progress=on_progress,
            )
        from .local import run_local

        return run_local(
            workflow,
            models=args.models or [DEFAULT_MODELS],
            input_dir=args.input or DEFAULT_INPUT,
            output_dir=args.out,
            changes=changes,
            timeout=args.timeout,
            on_progress=on_progress,
        )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(text)
    return seconds
