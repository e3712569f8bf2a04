"""`onediff-guard selftest`: check that this card computes what the pack assumes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...comfyui_host.host import selftest_directory
from ...precision.machine import look
from ...precision.self_test import keep
from ..errors import ExitCode, WorkflowError
from ..files import writing
from .answer import Answer

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="for example cuda:1 or cpu (default: where pipelines run)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result, as JSON (default: in the user folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> Answer:
    """Run the self-test and keep its result. The exit code is 4 if a check fails."""
    device = _device(args.device)
    from ...pipelines.selftest.checks import selftest  # needs a PyTorch that works

    result = selftest(device, lambda name, *_: print(f"{name} …", file=sys.stderr, flush=True))
    file = args.out or selftest_directory() / f"{result.key}.json"
    with writing(file):
        file = keep(result, file)
    lines = [result.in_words(), f"Saved in {file}. Attach that file to issues about this card."]
    code = ExitCode.RUN_FAILED if result.wrong else ExitCode.DONE
    return Answer(lines, {"file": file, **result.as_dict()}, exit_code=code)


def _device(name: str | None) -> torch.device:
    """Return the device. Raises WorkflowError if it does not exist."""
    here = look()
    if not here.torch_works:
        raise WorkflowError("; ".join(here.advice) or "PyTorch cannot be imported.")
    import torch

    try:
        device = torch.device(name or here.device)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().partition("\n")[0]
        raise WorkflowError(
            f"--device {name}: PyTorch has no such device here ({said}). Found: {here.device}."
        ) from error
    return device
