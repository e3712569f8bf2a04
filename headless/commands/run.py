"""`onediff-guard run`: run a workflow on the chosen host, and print its files and summary."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..hosts import chosen as hosts
from ..hosts.result import printed_progress
from ..workflow.graph import read_json
from ..workflow.settings import Setting
from .answer import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hosts.add_arguments(parser, output=Path("output"))


def main(args: argparse.Namespace) -> Answer:
    workflow = read_json(args.workflow)
    changes = [Setting.parse(change) for change in args.changes]
    with printed_progress(sys.stderr) as on_progress, hosts.opened(args) as host:
        result = host.run(workflow, output_dir=args.out, changes=changes, timeout=args.timeout, on_progress=on_progress)
    facts = {"files": result.files, "outputs": result.outputs, "seconds": round(result.seconds, 3)}
    facts |= {"guards": [*result.guards]} if args.guard else {}
    return Answer([*result.files, *result.summaries()], facts)
