"""`onediff-guard demo`: a small CogVideoX that overflows in fp16, run by the shipped workflow unguarded and guarded."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..headless.commands.answer import Answer
from ..headless.errors import RunFailedError
from ..headless.files import ensure_writable
from ..headless.hosts.result import libraries_without_bars
from .files import write_pictures, write_report, writing
from .outcome import INSIDE, INSIDE_TOO, MODEL, PROTECTED, RUNS
from .run import PROMPT, SIZES, command, run

if TYPE_CHECKING:
    from .small_model import Overflow

DEFAULT_OUTPUT = Path("output") / "demo"
TOY = (
    "A toy: CogVideoX's real classes and files, {size:.1f} MB of weights set by formula instead of trained, "
    "one block that overflows fp16. Made by: onediff-guard demo"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="videos, picture, report (default: output/demo)"
    )
    parser.add_argument("--keep-model", action="store_true", help="leave the small model in DIR/models, to play with")


def main(args: argparse.Namespace) -> Answer:
    """Build the model, run it in each case, write and print what came of it."""
    started = time.perf_counter()
    output: Path = args.out
    ensure_writable(output)
    with _model_folder(output, keep=args.keep_model) as models, libraries_without_bars():
        _quiet_libraries()
        print("Building a small CogVideoX whose residual stream leaves fp16's range ...", flush=True)
        size = _build(models / MODEL, "stream")
        _build(models / INSIDE, "inside")
        outcomes = [run(case, models, output) for case in RUNS]
    reference = outcomes[-1]
    note = TOY.format(size=size / 1e6)
    files = [outcome.video for outcome in outcomes]
    files += write_pictures(output, outcomes, note)
    files.append(write_report(output, outcomes, note, {"prompt": PROMPT, **SIZES}))
    print()
    for outcome in outcomes:
        print(f"{outcome.case.title:26}  {outcome.numbers(reference)}")
    print(f"\nDone in {time.perf_counter() - started:.0f} s. Look at {output / 'side-by-side.png'} first.")
    for path in files:
        print(f"  {path}")
    for outcome in outcomes:
        if outcome.case in (PROTECTED, INSIDE_TOO) and (verdict := outcome.verdict(reference)) != "right":
            raise RunFailedError(
                f"The run '{outcome.case.title}' is {verdict}, and should be right. Please report it, with "
                f"{output / 'report.json'}."
            )
    if args.keep_model:
        print(f"\nThe model is in {output / 'models'}. Run it again, with another prompt:\n  {command(output)}")
    return Answer()


def _build(folder: Path, overflow: Overflow) -> int:
    """Build the small model; returns the size of its weights in bytes."""
    from safetensors import SafetensorError

    from .small_model import build_cogvideox

    with writing(folder):
        try:
            build_cogvideox(
                folder,
                overflow=overflow,
                look="flow",
                width=SIZES["width"],
                height=SIZES["height"],
                frames=SIZES["frames"],
            )
        except SafetensorError as error:
            raise OSError(str(error)) from error
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@contextmanager
def _model_folder(output: Path, *, keep: bool) -> Generator[Path]:
    if keep:
        kept = output / "models"
        for name in (MODEL, INSIDE):
            if (kept / name / "model_index.json").is_file():  # an earlier demo's
                shutil.rmtree(kept / name)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix=".models-", dir=output) as folder:
        yield Path(folder)


def _quiet_libraries() -> None:
    """Hints of the libraries would bury what the demo has to say."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    of_diffusers.set_verbosity_error()
    of_transformers.set_verbosity_error()
