"""`onediff-guard run`: arguments in, a host chosen, files and summary out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..hosts import chosen as hosts
from ..hosts.result import RunResult
from ..progress import ProgressPrinter
from ..workflow.graph import read_json
from ..workflow.settings import Setting
from . import answer

DEFAULT_OUTPUT = Path("output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hosts.add_arguments(parser, output=DEFAULT_OUTPUT)


def main(args: argparse.Namespace) -> int:
    """Run the workflow and print what came of it; the exit code."""
    with answer.errors_told(args.json):
        result = _run(args)
    if args.json:
        answer.done(files=result.files, outputs=result.outputs, seconds=round(result.seconds, 3))
    else:
        for line in [*map(str, result.files), *result.summaries()]:
            print(line)
    return 0


def _run(args: argparse.Namespace) -> RunResult:
    workflow = read_json(args.workflow)
    changes = [Setting.parse(change) for change in args.changes]
    with ProgressPrinter(sys.stderr) as on_progress, hosts.opened(args) as host:
        return host.run(workflow, output_dir=args.out, changes=changes, timeout=args.timeout, on_progress=on_progress)
