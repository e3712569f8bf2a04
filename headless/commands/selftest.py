"""`onediff-guard selftest`: whether this card computes what the pack takes for granted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ExitCode, OutputError, RunFailedError, WorkflowError
from . import answer

if TYPE_CHECKING:
    import torch

    from ...precision.self_test import SelfTest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="for example cuda:1 or cpu (default: where pipelines run)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result, as JSON (default: in the user folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Run it, keep the result, and print it. 4 where a line is wrong."""
    from ...pipelines.errors import DeviceGone
    from ...pipelines.selftest.checks import selftest

    with answer.errors_told(args.json):
        try:
            result = selftest(_device(args.device), lambda name, *_: print(f"{name} …", file=sys.stderr, flush=True))
        except DeviceGone as error:
            raise RunFailedError(str(error)) from error
        file = _kept(result, args.out)
    if args.json:
        answer.done(file=file, **result.as_dict())
    else:
        print(result.in_words())
        print(f"Kept in {file}. Add that file to an issue about this card.")
    return int(ExitCode.RUN_FAILED if result.wrong else ExitCode.DONE)


def _device(name: str | None) -> torch.device:
    """Raises WorkflowError where there is no such device."""
    import torch

    from ...precision.machine import look

    here = look()
    if not here.torch_works:
        raise WorkflowError("; ".join(here.advice) or "PyTorch cannot be imported.")
    try:
        device = torch.device(name or here.device)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().partition("\n")[0]
        raise WorkflowError(
            f"--device {name}: PyTorch has no such device here ({said}). Found: {here.device}."
        ) from error
    return device


def _kept(result: SelfTest, file: Path | None) -> Path:
    """Raises OutputError where it cannot be written."""
    from ...comfyui_host.host import selftest_directory
    from ...precision.self_test import keep

    file = file or selftest_directory() / f"{result.key}.json"
    try:
        return keep(result, file)
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error.strerror or error}.") from error
