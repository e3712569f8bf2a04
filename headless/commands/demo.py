"""`onediff-guard demo`: a small CogVideoX that overflows in fp16, run by the shipped workflow unguarded and guarded."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...comfyui_host.host import PROFILES_VARIABLE
from ..errors import OutputError, RunFailedError
from ..files import ensure_writable
from ..workflow.settings import Setting
from .progress import libraries_without_bars

if TYPE_CHECKING:
    import torch

    from ..small_model import Overflow

logger = logging.getLogger(__name__)

WORKFLOW = Path(__file__).resolve().parents[2] / "workflows" / "api" / "cogvideox_text_to_video.json"
DEFAULT_OUTPUT = Path("output") / "demo"
MODEL = "toy-cogvideox"
INSIDE = "toy-cogvideox-inside"  # the same, with hidden activations of one block that leave fp16's range too
PROMPT = "a slow river of colour moves through the night"
FPS = 8.0
TOLERANCE = 2e-2  # of the value range; what a guarded fp16 run may differ from fp32
SIZES = {"width": 256, "height": 160, "frames": 25}
TOY = (
    "A toy: CogVideoX's real classes and files, {size:.1f} MB of weights set by formula instead of trained, "
    "one block that overflows fp16. Made by: onediff-guard demo"
)


@dataclass(frozen=True)
class Case:
    """What one run shows."""

    title: str
    precision: str
    video: str  # name of its file
    model: str = MODEL


PLAIN = Case("fp16 (plain)", "fp16 (plain)", "fp16-plain")
WIDE = Case("fp16, made safe", "fp16", "fp16-guarded")
LEARNS = Case("fp16, inside a block too", "fp16", "fp16-inside", INSIDE)
EXACT = Case("fp32", "fp32", "fp32")
RUNS = (PLAIN, WIDE, LEARNS, EXACT)


@dataclass(frozen=True)
class Outcome:
    """One run's video, and what its stages reported."""

    case: Case
    images: torch.Tensor  # [frames, height, width, 3], 0 to 1, float32
    video: Path
    stages: list[dict[str, Any]]  # the nodes' reports, in the order they ran
    seconds: float

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for stage in self.stages for step in stage["steps"] if step["stage"] == "denoiser"]

    def count(self, *outcomes: str) -> int:
        """How many denoising steps ended so."""
        return sum(step["outcome"] in outcomes for step in self.steps)

    @property
    def broken_frames(self) -> int:
        return int((~self.images.isfinite()).flatten(1).any(1).sum())

    def difference(self, reference: Outcome) -> float:
        """max |difference| from another run's frames, whose range is 1; NaN where this one is NaN."""
        return (self.images - reference.images).abs().max().item()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="videos, picture, report (default: output/demo)"
    )
    parser.add_argument("--keep-model", action="store_true", help="leave the small model in DIR/models, to play with")


def main(args: argparse.Namespace) -> int:
    """Build the model, run it three times, write and print what came of it; the exit code."""
    started = time.perf_counter()
    output: Path = args.out
    ensure_writable(output)
    with _model_folder(output, keep=args.keep_model) as models, libraries_without_bars():
        _quiet_libraries()
        print("Building a small CogVideoX whose residual stream leaves fp16's range ...", flush=True)
        size = _build(models / MODEL, "stream")
        _build(models / INSIDE, "inside")
        outcomes = [_run(case, models, output) for case in RUNS]
    reference = outcomes[-1]
    files = [outcome.video for outcome in outcomes]
    files += _write_pictures(output, outcomes, TOY.format(size=size / 1e6))
    files.append(_write_report(output, outcomes, TOY.format(size=size / 1e6)))
    print()
    for outcome in outcomes:
        print(f"{outcome.case.title:26}  {_numbers(outcome, reference)}")
    print(f"\nDone in {time.perf_counter() - started:.0f} s. Look at {output / 'side-by-side.png'} first.")
    for path in files:
        print(f"  {path}")
    for outcome in outcomes:
        if outcome.case in (WIDE, LEARNS) and (verdict := _verdict(outcome, reference)) != "right":
            raise RunFailedError(
                f"The run '{outcome.case.title}' is {verdict}, and should be right. Please report it, with "
                f"{output / 'report.json'}."
            )
    if args.keep_model:
        print(f"\nThe model is in {output / 'models'}. Run it again, with another prompt:\n  {_command(output)}")
    return 0


def _run(case: Case, models: Path, output: Path) -> Outcome:
    from ..run import run_local
    from ..workflow.graph import read_json

    print(f"Running {WORKFLOW.name} in {case.title} ...", flush=True)
    workflow = read_json(WORKFLOW)
    changes = [*_changes(case), Setting("Encode Prompt", "prompt", PROMPT)]
    with tempfile.TemporaryDirectory(prefix=".run-", dir=output) as folder, _nothing_learned_before(folder):
        result = run_local(workflow, models=[models], input_dir=output, output_dir=Path(folder), changes=changes)
        with _writing(output):
            video = output / f"{case.video}.mp4"
            os.replace(result.files[0], video)
    decoder = next(node for node, spec in workflow.items() if spec["class_type"] == "OneDiffGuardDecodeLatents")
    return Outcome(case, result.results[decoder][0].float().cpu(), video, result.stages(), result.seconds)


@contextmanager
def _nothing_learned_before(folder: str) -> Generator[None]:
    """Each demo begins where a first run does."""
    before = os.environ.get(PROFILES_VARIABLE)
    os.environ[PROFILES_VARIABLE] = str(Path(folder) / "profiles")
    try:
        yield
    finally:
        if before is None:
            del os.environ[PROFILES_VARIABLE]
        else:
            os.environ[PROFILES_VARIABLE] = before


def _changes(case: Case) -> list[Setting]:
    values: dict[str, Any] = {
        "Load CogVideoX.model": case.model,
        "Load CogVideoX.precision": case.precision,
        "Load CogVideoX.backend": "eager",
        **{f"Sample CogVideoX.{name}": value for name, value in SIZES.items()},
        "Sample CogVideoX.steps": 8,
        "Sample CogVideoX.scheduler": "DDIM",
        "Sample CogVideoX.seed": 1,
        "NaN Guard.on_failure": "off" if case is PLAIN else "rerun",
        "NaN Guard.scope": "learned",
        "Decode Latents.tiling": False,
        "Decode Latents.precision": "fp32",  # the same in all; fp16 convolutions take minutes on many CPUs
        "Create Video.fps": FPS,
    }
    return [
        Setting(*name.split("."), text=value if isinstance(value, str) else json.dumps(value))
        for name, value in values.items()
    ]


def _build(folder: Path, overflow: Overflow) -> int:
    """Build the small model; returns the size of its weights in bytes."""
    from safetensors import SafetensorError

    from ..small_model import build_cogvideox

    with _writing(folder):
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


def _verdict(outcome: Outcome, reference: Outcome) -> str:
    if outcome is reference:
        return "reference"
    if outcome.broken_frames:
        return "black"
    return "right" if outcome.difference(reference) <= TOLERANCE else "wrong"


def _numbers(outcome: Outcome, reference: Outcome) -> str:
    frames, steps = len(outcome.images), len(outcome.steps)
    if outcome is reference:
        return f"{steps} steps in fp32 · every frame finite"
    broken = outcome.broken_frames
    told = [f"{broken} of {frames} frames NaN" if broken else "every frame finite"]
    if failed := outcome.count("non-finite", "saturated"):
        told.append(f"{failed} of {steps} steps not finite")
    if reruns := outcome.count("rerun"):
        widened = any((stage.get("learned") or {}).get("wide_parts") for stage in outcome.stages)
        told.append(f"{reruns} of {steps} steps computed again in fp32{', then wide' if widened else ''}")
    if not broken:
        told.append(f"max difference from fp32 {outcome.difference(reference):.4f}")
    return " · ".join(told)


def _write_pictures(output: Path, outcomes: Sequence[Outcome], footnote: str) -> list[Path]:
    from ..comparison import pictures
    from ..hosts.core_nodes import to_uint8

    reference = outcomes[-1]
    colours = {"black": pictures.BAD, "wrong": pictures.BAD, "right": pictures.GOOD, "reference": pictures.NEUTRAL}
    runs = []
    for outcome in outcomes:
        verdict = _verdict(outcome, reference)
        frames = to_uint8(outcome.images.nan_to_num())
        runs.append(pictures.Run(outcome.case.title, verdict, colours[verdict], _numbers(outcome, reference), frames))
    still = pictures.still(
        runs,
        heading="CogVideoX in fp16, plain and made safe",
        subheading="One seed and prompt. A block writes 500,000 into the residual stream, and in the third run a layer "
        "inside it overflows too; fp16 ends at 65,504.",
        footnote=footnote,
    )
    moving = pictures.webp(pictures.animation(runs, footnote=footnote), fps=FPS)
    return [
        _write(output / "side-by-side.png", pictures.png(still)),
        _write(output / "side-by-side.webp", moving),
    ]


def _write_report(output: Path, outcomes: Sequence[Outcome], note: str) -> Path:
    reference = outcomes[-1]
    report = {
        "note": note,
        "prompt": PROMPT,
        **SIZES,
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers", "onediff")}
        | {"python": platform.python_version()},
        "runs": [
            {
                "run": outcome.case.title,
                "precision": outcome.case.precision,
                "video": outcome.video.name,
                "seconds": round(outcome.seconds, 2),
                "frames": len(outcome.images),
                "frames_not_finite": outcome.broken_frames,
                "steps": len(outcome.steps),
                "steps_not_finite": outcome.count("non-finite", "saturated"),
                "steps_rerun_in_fp32": outcome.count("rerun"),
                "max_difference_from_fp32": outcome.difference(reference),
                "stages": outcome.stages,
            }
            for outcome in outcomes
        ],
    }
    strict = json.loads(json.dumps(report, default=str), parse_constant=str)  # JSON has no NaN: "NaN"
    return _write(output / "report.json", (json.dumps(strict, indent=2) + "\n").encode())


def _write(path: Path, data: bytes) -> Path:
    """Write a file whole, over an earlier one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _writing(path):
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"Cannot write {path}: {reason}. Free space, or choose another folder with --out.") from error


def _command(output: Path) -> str:
    """The demo's run, as a command of its own."""
    changes = [*_changes(WIDE), Setting("Encode Prompt", "prompt", "a red balloon")]
    sets = " ".join(f'--set "{change.node}.{change.input}={change.text}"' for change in changes)
    return f'onediff-guard run "{WORKFLOW}" --models "{output / "models"}" {sets}'
