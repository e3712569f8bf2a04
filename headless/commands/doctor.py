"""`onediff-guard doctor`: what would run here, or on another card, and why. Runs nothing."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...comfyui_host.host import selftest_directory
from ...nodes.inputs import ACCUMULATIONS, PRECISIONS
from ...nodes.report import architecture_of, with_surroundings
from ...pipelines.errors import BadFolder
from ...pipelines.insight.diagnosis import Diagnosis, diagnose, summary
from ...precision.accumulation import Accumulation
from ...precision.policy import Precision
from ...trust.message import BadInput
from .answer import Answer

if TYPE_CHECKING:
    from ...pipelines.insight.vram_estimate import Size

OTHER_CARD = "for another card, for example sm75, 8.6, sm75-gtx16, gfx1100, xpu, mps or cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = "a folder, SVD's single file, or the hub id of a model in the cache (default: all known variants)"
    parser.add_argument("--model", type=Path, metavar="MODEL", help=models)
    parser.add_argument("--arch", metavar="NAME", help=f"plan {OTHER_CARD}")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="as the loader's precision")
    of_loader = "as the loader's accumulation"
    parser.add_argument("--accumulation", choices=ACCUMULATIONS, default=ACCUMULATIONS[0], help=of_loader)
    cards = "estimate how each stage would run on a card with this much memory"
    parser.add_argument("--vram", type=float, metavar="GIB", help=cards)
    sizes = "output size for --vram (default: the model's own)"
    parser.add_argument("--size", type=_size, metavar="WxHxFRAMES", help=sizes)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _size(text: str) -> Size:
    """Return width, height and frames. Raises ArgumentTypeError if the text is not a size."""
    found = re.fullmatch(r"(\d{1,5})[x×](\d{1,5})(?:[x×](\d{1,5}))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: write 720x480x49, or 1024x1024 for an image.")
    width, height, frames = found.groups(default="1")
    return int(width), int(height), int(frames)


def main(args: argparse.Namespace) -> Answer:
    """Return the diagnosis, with or without a GPU: a summary of one screen, or everything with --verbose."""
    diagnosis = examine(args.model, args.arch, args.precision, args.accumulation, args.vram, args.size)
    return Answer([diagnosis.text() if args.verbose else summary(diagnosis)], diagnosis.as_dict())


def examine(
    model: Path | None = None,
    architecture: str | None = None,
    precision: str = "auto",
    accumulation: str = "auto",
    vram: float | None = None,
    size: Size | None = None,
) -> Diagnosis:
    """Diagnose what would run on this machine or on another architecture, for one model or for all variants.

    model: its folder, Stable Video Diffusion's single file, or the hub id of a model in the cache.
    vram: a card's memory in GiB, to estimate how each stage would run. size: width, height and frames of the output.

    Raises BadFolder, BadInput or BadSize.
    """
    if vram is not None and not 1 <= vram <= 4096:
        raise BadInput("--vram {:g} is not a card's memory in GiB: use a number from 1 to 4096, for example 12.", vram)
    if size and vram is None:
        raise BadInput("--size needs --vram: add the card's memory in GiB, for example --vram 12.")
    try:
        diagnosis = diagnose(
            on_disk(model) if model else None,
            architecture_of(architecture),
            precision=Precision(precision),
            accumulation=Accumulation(accumulation),
            memory=None if vram is None else int(vram * 2**30),
            size=size,
            selftests=selftest_directory(),
        )
    except OSError as error:
        raise BadFolder(f"'{model}' cannot be read: {error}.") from error
    return with_surroundings(diagnosis)


def on_disk(model: Path) -> Path:
    """Return a model's own path, or the folder of a hub id in the cache. Raises BadInput if neither exists."""
    if model.exists():
        return model.resolve()
    from ...pipelines.errors import HubError
    from ...pipelines.models.hub import fetch  # imported late: doctor runs even if huggingface_hub fails

    try:
        return fetch(model.as_posix(), None, download=False)
    except HubError:
        raise BadInput(
            f"There is no '{model}'. Name the folder that holds the model's model_index.json, Stable Video Diffusion's "
            "single file, or the hub id of a model that Load Pipeline has downloaded."
        ) from None
