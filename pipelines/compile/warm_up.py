"""Compiling ahead of a run: a short sampling at each size that later runs will have."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...precision.policy import Precision
from ...precision.report import RunReport
from ...trust.message import BadInput, Message
from ..errors import BadSize
from ..insight.probe import usual_size
from ..run.encode import encode_prompts
from ..run.handle import PipelineHandle
from ..run.sample import SampleSettings, check_size, sample
from .block import Tell

STEPS = 2  # where the first fails, the second is what was learned
_SIZE = re.compile(r"(\d+)\s*[x×*]\s*(\d+)(?:\s*[x×*]\s*(\d+))?", re.IGNORECASE)

StepDone = Callable[[int, int, str], None]  # steps done, steps in all, a line on the latest; raises to interrupt
Embeddings = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Size:
    width: int  # pixels
    height: int  # pixels
    frames: int = 1

    def __str__(self) -> str:
        return Message("{}×{}", self.width, self.height) + (Message("×{}", self.frames) if self.frames > 1 else "")


@dataclass(frozen=True)
class Warmed:
    """What one size took."""

    size: Size
    seconds: float
    report: RunReport

    def __str__(self) -> str:
        return Message("{}: {:.1f} s{}; {}", self.size, self.seconds, self.report.compiled(), self.report.summary())


def sizes_of(handle: PipelineHandle, text: str) -> list[Size]:
    """One size a line, "720×480×49" or "1024×1024". A video's frames may be left out: as many as the model was made
    for. Nothing at all: the size that the model was made for.

    Raises BadInput, BadSize.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    sizes = [_size_of(handle, line) for line in lines] or [Size(*usual_size(handle, 0, 0, 0))]
    return list(dict.fromkeys(sizes))


def warm_up(
    handle: PipelineHandle,
    sizes: Sequence[Size],
    *,
    embeddings: Embeddings | None = None,
    guidance: bool = True,
    request: Precision | None = None,
    step_done: StepDone | None = None,
    tell: Tell | None = None,
) -> list[Warmed]:
    """Sample `STEPS` steps at each size, so that later runs find everything compiled. What such runs teach is kept as
    other runs' is.

    embeddings: positive and negative, as `sample` takes them; None: an empty prompt is encoded. A model that starts
        from an image is given a grey one.
    guidance: whether later runs use guidance: with it, the denoiser computes two halves at once.
    tell: as `sample` takes it.
    """
    from PIL import Image

    if handle.family.prompt and embeddings is None:
        (positive, negative), _ = encode_prompts(
            handle, ["", ""], request, lambda _done, _total, text: tell and tell(text)
        )
        embeddings = positive, negative
    done: list[Warmed] = []
    for number, size in enumerate(sizes):

        def on_step(step: int, _total: int, report: RunReport, size: Size = size, number: int = number) -> None:
            if step_done:
                text = Message("{}: step {}/{}, {}", size, step, STEPS, report.plan.numerics)
                step_done(number * STEPS + step, len(sizes) * STEPS, text)

        image = Image.new("RGB", (size.width, size.height), "grey") if handle.family.takes_image else None
        started = time.perf_counter()
        _, report = sample(
            handle,
            *(embeddings or (None, None)),
            _settings(size, guidance=guidance),
            image=image,
            request=request,
            step_done=on_step,
            tell=tell and (lambda text, size=size: tell(f"{size}: {text}")),
            compile_now=True,
        )
        done.append(Warmed(size, time.perf_counter() - started, report))
    return done


def _size_of(handle: PipelineHandle, line: str) -> Size:
    found = _SIZE.fullmatch(line)
    if not found:
        raise BadInput(
            "'sizes' has the line '{}'. Write one size a line: width×height or width×height×frames, such as "
            "720×480×49.",
            line,
        )
    width, height, frames = (int(number or 0) for number in found.groups())
    if frames > 1 and not handle.family.layout.counts_frames:
        raise BadInput(
            "'sizes' has the line '{}', but {} makes images: leave the frames out.", line, handle.family.name
        )
    size = Size(*usual_size(handle, width, height, frames))
    try:
        check_size(handle, _settings(size, guidance=True))
    except BadSize as error:
        raise BadSize("'sizes' has the line '{}': {}", line, error) from None
    return size


def _settings(size: Size, *, guidance: bool) -> SampleSettings:
    scale = 2.0 if guidance else 1.0
    return SampleSettings(size.width, size.height, STEPS, 0, size.frames, scale)
