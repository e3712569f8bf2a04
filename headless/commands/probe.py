"""`onediff-guard probe`: a graph of Load, Encode Prompt, Numerics Probe and SaveImage, run in this process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ...nodes.inputs import PRECISIONS
from ...nodes.report import architecture_of
from ...pipelines.families.spec import FamilySpec
from ...pipelines.models.folder import family_of
from ..errors import WorkflowError
from ..files import write_together
from ..hosts.local import run_local
from ..hosts.result import RunResult, printed_progress
from .answer import Answer
from .doctor import OTHER_CARD, on_disk

PROMPT = "a red kite above a quiet village, early in the morning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = "a folder, Stable Video Diffusion's single file, or the hub id of a model in the cache"
    parser.add_argument("--model", type=Path, required=True, metavar="MODEL", help=models)
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of a whole schedule (default: 4)")
    parser.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT}")
    parser.add_argument("--image", type=Path, metavar="FILE", help="for models that start from an image")
    for name, of in (("width", "pixels"), ("height", "pixels"), ("frames", "frames")):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=f"{of} (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the noise (default: 0)")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="as the loader's precision")
    parser.add_argument("--arch", metavar="NAME", help=f"recommend {OTHER_CARD}")
    parser.add_argument("--save", action="store_true", help="also store the profile for later runs")
    parser.add_argument(
        "--out", type=Path, default=Path("output", "probe"), metavar="DIR", help="default: output/probe"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> Answer:
    """Measure a model; write picture, text and profile; recommend settings."""
    result = _run(args)
    (picture,), (_, text, profile) = result.files, result.results["probe"]
    beside = {".txt": f"{text}\n".encode()} | ({".json": profile.encode()} if profile else {})
    files = [picture, *write_together(picture.parent, picture.stem, beside)]
    return Answer([text, *files], {"files": files, **result.outputs["probe"]["onediff_guard"][0]})


def _run(args: argparse.Namespace) -> RunResult:
    model = on_disk(args.model)
    family = family_of(model)
    card = architecture_of(args.arch)
    images = Path("no-images")
    if args.image and not family.takes_image:
        raise WorkflowError(f"'{args.model}' does not start from an image. Leave out --image.")
    if family.takes_image:
        if not (args.image and args.image.is_file()):
            raise WorkflowError(f"'{args.model}' needs a start image: give one with --image. Found: {args.image}.")
        args.image = args.image.resolve()  # the user's own link may lead anywhere
        images = args.image.parent
    with printed_progress(sys.stderr) as on_progress:
        return run_local(
            _graph(args, model.name, family, card.name if card else None),
            models=[model if model.is_dir() else model.parent],
            input_dir=images,
            output_dir=args.out,
            on_progress=on_progress,
        )


def _graph(args: argparse.Namespace, model: str, family: FamilySpec, card: str | None) -> dict[str, Any]:
    pipeline = ["load", 0]
    loading = {"model": model, "precision": args.precision, "backend": "eager", "offload": "none"}
    probing: dict[str, Any] = {"pipeline": pipeline, "guidance_scale": 6.0, "save": args.save}
    probing |= {name: getattr(args, name) for name in ("steps", "width", "height", "frames", "seed")}
    graph: dict[str, Any] = {"load": {"class_type": "OneDiffGuardLoadPipeline", "inputs": loading}}
    if family.prompt:
        prompts = {"pipeline": pipeline, "prompt": args.prompt, "negative_prompt": "", "precision": "inherit"}
        graph["encode"] = {"class_type": "OneDiffGuardEncodePrompt", "inputs": prompts}
        probing |= {"positive": ["encode", 0], "negative": ["encode", 1]}
    if family.takes_image:
        graph["image"] = {"class_type": "LoadImage", "inputs": {"image": args.image.name}}
        probing["image"] = ["image", 0]
    if card:
        probing["architecture"] = card
    graph["probe"] = {"class_type": "OneDiffGuardNumericsProbe", "inputs": probing}
    graph["save"] = {"class_type": "SaveImage", "inputs": {"images": ["probe", 0], "filename_prefix": "probe"}}
    return graph
