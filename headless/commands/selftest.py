"""`onediff-guard selftest`: whether this card computes what the pack takes for granted."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ExitCode, OutputError, WorkflowError
from . import answer

if TYPE_CHECKING:
    import torch

    from ...pipelines.insight.selftest import Line, SelfTest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="for example cuda:1 or cpu (default: where pipelines run)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result, as JSON (default: in the user folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Run it, keep the result, and print it. 4 where a line is wrong."""
    from ...pipelines.insight.selftest import selftest

    with answer.errors_told(args.json):
        result = selftest(_device(args.device), lambda name: print(f"{name} …", file=sys.stderr, flush=True))
        file = _kept(result, args.out)
    if args.json:
        answer.done(file=file, **result.as_dict())
    else:
        print(in_words(result))
        print(f"Kept in {file}. Add that file to an issue about this card.")
    return int(ExitCode.RUN_FAILED if result.wrong else ExitCode.DONE)


def in_words(result: SelfTest) -> str:
    about = ", ".join(f"{name} {value}" for name, value in result.machine.items() if value and name != "device")
    lines = [f"Self-test of {result.machine['device']} ({result.device}), {result.date}", f"  {about}"]
    lines += [f"  {_line(line)}" for line in result.lines]
    lines += [f"  {name}: {_milliseconds(seconds)}" for name, seconds in result.seconds.items()]
    ran = sum(line.verdict != "not run" for line in result.lines)
    if result.wrong:
        lines.append(
            f"Result: {len(result.wrong)} of {ran} lines are WRONG on this card. Choose another precision there."
        )
    else:
        lines.append(f"Result: OK. All {ran} lines that ran are right.")
    return "\n".join(lines)


def _line(line: Line) -> str:
    verdict = {"right": "right  ", "wrong": "WRONG  ", "not run": "not run"}[line.verdict]
    error = "" if line.error is None else f"error {line.error:.1e}, of {line.bound:.1e} at most"
    return f"{verdict}  {line.name:<48} {line.note or error}".rstrip()


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def _device(name: str | None) -> torch.device:
    """Raises WorkflowError where there is no such device."""
    import torch

    from ...pipelines.insight.machine import look

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
    from ...pipelines.atomic_files import replacing

    file = file or selftest_directory() / f"{result.key}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            stream.write(json.dumps(result.as_dict(), indent=2, allow_nan=False).encode())
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error.strerror or error}.") from error
    return file
