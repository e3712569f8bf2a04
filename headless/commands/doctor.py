"""`onediff-guard doctor`: what would run here, or on another card, and why. Runs nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import WorkflowError
from . import answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ...nodes.inputs import ACCUMULATIONS, PRECISIONS

    models = "a folder, SVD's single file, or the hub id of a model in the cache (default: all known variants)"
    parser.add_argument("--model", type=Path, metavar="MODEL", help=models)
    parser.add_argument(
        "--arch",
        metavar="NAME",
        help="plan for another card, for example sm75, 8.6, sm75-gtx16, gfx1100, xpu, mps or cpu",
    )
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="as the loader's precision")
    parser.add_argument(
        "--accumulation", choices=ACCUMULATIONS, default=ACCUMULATIONS[0], help="as the loader's accumulation"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Print the diagnosis. 0 wherever it could be made, with or without a GPU."""
    from ...nodes.report import BAD_REQUEST, examine

    with answer.errors_told(args.json):
        try:
            diagnosis = examine(args.model, args.arch, args.precision, args.accumulation)
        except BAD_REQUEST as error:
            raise WorkflowError(str(error)) from error
    if args.json:
        answer.done(**diagnosis.as_dict())
    else:
        print(diagnosis.text())
    return 0
