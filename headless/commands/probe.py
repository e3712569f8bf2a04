"""`onediff-guard probe`: a graph of Load, Encode Prompt, Numerics Probe and SaveImage, run in this process."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OutputError, WorkflowError
from ..hosts.result import RunResult
from . import answer
from .asked_model import BAD_REQUEST, on_disk
from .progress import ProgressPrinter

DEFAULT_OUTPUT = Path("output") / "probe"
PROMPT = "a red kite above a quiet village, early in the morning"
NOT_READ = Path("no-images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ...nodes.inputs import PRECISIONS

    models = "a folder, Stable Video Diffusion's single file, or the hub id of a model in the cache"
    parser.add_argument("--model", type=Path, required=True, metavar="MODEL", help=models)
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of a whole schedule (default: 4)")
    parser.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT}")
    parser.add_argument("--image", type=Path, metavar="FILE", help="for models that start from an image")
    for name, of in (("width", "pixels"), ("height", "pixels"), ("frames", "frames")):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=f"{of} (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise (default: 0)")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="as the loader's precision")
    parser.add_argument("--arch", metavar="NAME", help="recommend for another card, for example sm75")
    parser.add_argument("--save", action="store_true", help="keep the profile for later runs, too")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="picture, text, profile (default: output/probe)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Measure, write picture, text and profile, and print the recommendation; the exit code."""
    with answer.errors_told(args.json):
        result = _run(args)
        files = [*result.files, *_write_beside(result.files[0], *result.results["probe"][1:])]
    if args.json:
        (told,) = result.outputs["probe"]["onediff_guard"]
        answer.done(files=files, **told)
    else:
        for line in [result.results["probe"][1], *map(str, files)]:
            print(line)
    return 0


def _run(args: argparse.Namespace) -> RunResult:
    from ...nodes.report import architecture_of
    from ..hosts.local import run_local

    try:
        subject = _subject_of(args.model)
        card = architecture_of(args.arch)
    except BAD_REQUEST as error:
        raise WorkflowError(str(error)) from error
    if subject.from_image and not (args.image and args.image.is_file()):
        raise WorkflowError(f"'{args.model}' starts from an image: name one with --image. Found: {args.image}.")
    if subject.from_image:
        args.image = args.image.resolve()  # a link of the user's own may lead anywhere
    with ProgressPrinter(sys.stderr) as on_progress:
        return run_local(
            _graph(args, subject, card.name if card else None),
            models=[subject.model if subject.model.is_dir() else subject.model.parent],
            input_dir=args.image.parent if subject.from_image else NOT_READ,
            output_dir=args.out,
            on_progress=on_progress,
        )


@dataclass(frozen=True)
class _Subject:
    """What has to be wired for a model."""

    model: Path
    loader: type  # the node that loads it
    prompted: bool
    from_image: bool


def _subject_of(model: Path) -> _Subject:
    """Look what kind of model this is: a folder, Stable Video Diffusion's single file, or a hub id in the cache.

    Raises BadInput where it is not there, BadFolder where no node loads it.
    """
    from ...nodes.load import loaders
    from ...pipelines.models.recognised import family_of

    path = on_disk(model)
    family = family_of(path)
    return _Subject(path, loaders()[family.pipeline], family.prompt is not None, family.takes_image)


def _graph(args: argparse.Namespace, subject: _Subject, card: str | None) -> dict[str, Any]:
    from ...nodes import NODE_CLASS_MAPPINGS

    (loader,) = (name for name, node in NODE_CLASS_MAPPINGS.items() if node is subject.loader)
    pipeline = ["load", 0]
    loading = {"model": subject.model.name, "precision": args.precision, "backend": "eager", "offload": "none"}
    probing: dict[str, Any] = {"pipeline": pipeline, "guidance_scale": 6.0, "save": args.save}
    probing |= {name: getattr(args, name) for name in ("steps", "width", "height", "frames", "seed")}
    graph: dict[str, Any] = {"load": {"class_type": loader, "inputs": loading}}
    if subject.prompted:
        prompts = {"pipeline": pipeline, "prompt": args.prompt, "negative_prompt": "", "precision": "inherit"}
        graph["encode"] = {"class_type": "OneDiffGuardEncodePrompt", "inputs": prompts}
        probing |= {"positive": ["encode", 0], "negative": ["encode", 1]}
    if subject.from_image:
        graph["image"] = {"class_type": "LoadImage", "inputs": {"image": args.image.name}}
        probing["image"] = ["image", 0]
    if card:
        probing["architecture"] = card
    graph["probe"] = {"class_type": "OneDiffGuardNumericsProbe", "inputs": probing}
    graph["save"] = {"class_type": "SaveImage", "inputs": {"images": ["probe", 0], "filename_prefix": "probe"}}
    return graph


def _write_beside(picture: Path, text: str, profile: str) -> list[Path]:
    """Recommendation and profile, under the picture's name."""
    contents = {picture.with_suffix(".txt"): f"{text}\n", picture.with_suffix(".json"): profile}
    try:
        for file, content in contents.items():
            if content:
                file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"Cannot write beside {picture}: {error}. Free space, or choose --out.") from error
    return [file for file, content in contents.items() if content]
