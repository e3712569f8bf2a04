"""The demo's pictures: runs one below the other as a still, beside each other as an animation. Needs no font file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

PAPER: Colour = (13, 17, 23)
EDGE: Colour = (48, 54, 61)
TEXT: Colour = (240, 246, 252)
QUIET: Colour = (145, 152, 161)
BAD: Colour = (218, 54, 51)
GOOD: Colour = (35, 134, 54)
NEUTRAL: Colour = (62, 71, 84)

STILL_WIDTH = 1200  # px; what a README shows without scaling
MARGIN, GAP = 28, 11  # px


@dataclass(frozen=True)
class Run:
    """One video and what is said about it."""

    title: str
    verdict: str  # one or two words, shown on `colour`
    colour: Colour
    numbers: str
    frames: np.ndarray  # uint8 [frames, height, width, 3]


def still(runs: Sequence[Run], *, heading: str, subheading: str, footnote: str, columns: int = 5) -> Image.Image:
    """One row for each run: a line about it, and `columns` frames spread evenly over its video."""
    cell_width = (STILL_WIDTH - 2 * MARGIN - (columns - 1) * GAP) // columns
    cell_height = round(cell_width * runs[0].frames.shape[1] / runs[0].frames.shape[2])
    head, line, foot = 104, 40, 58
    row = line + cell_height + 22
    picture = Image.new("RGB", (STILL_WIDTH, head + len(runs) * row + foot), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, 24), heading, TEXT, _font(32))
    draw.text((MARGIN, 66), subheading, QUIET, _font(18))
    for index, run in enumerate(runs):
        top = head + index * row
        _label(draw, run, left=MARGIN, right=STILL_WIDTH - MARGIN, middle=top + line // 2 - 3, size=21)
        chosen = np.linspace(0, len(run.frames) - 1, columns).round().astype(int)
        for column, frame in enumerate(run.frames[chosen]):
            _paste(picture, frame, MARGIN + column * (cell_width + GAP), top + line, cell_width, cell_height)
    draw.text((MARGIN, picture.height - foot + 14), footnote, QUIET, _font(15))
    return picture


def animation(runs: Sequence[Run], *, footnote: str, frame_width: int = 300) -> Iterator[Image.Image]:
    """The runs beside each other, one picture for each frame of the videos."""
    frame_height = round(frame_width * runs[0].frames.shape[1] / runs[0].frames.shape[2])
    line, foot, margin = 44, 40, 16
    width = 2 * margin + len(runs) * frame_width + (len(runs) - 1) * GAP
    blank = Image.new("RGB", (width, line + frame_height + foot), PAPER)
    draw = ImageDraw.Draw(blank)
    lefts = [margin + index * (frame_width + GAP) for index in range(len(runs))]
    for run, left in zip(runs, lefts, strict=True):
        _label(draw, run, left=left, right=left + frame_width, middle=line // 2, size=18, numbers=False)
    draw.text((margin, blank.height - foot + 12), footnote, QUIET, _font(13))
    for index in range(min(len(run.frames) for run in runs)):
        picture = blank.copy()
        for run, left in zip(runs, lefts, strict=True):
            _paste(picture, run.frames[index], left, line, frame_width, frame_height)
        yield picture


def png(picture: Image.Image) -> bytes:
    data = BytesIO()
    picture.save(data, "PNG", optimize=True)
    return data.getvalue()


def webp(pictures: Iterator[Image.Image], *, fps: float) -> bytes:
    """An animated WEBP that repeats for ever and rests on its last picture for a second."""
    frames = list(pictures)
    durations = [round(1000 / fps)] * (len(frames) - 1) + [1000]
    data = BytesIO()
    rest = frames[1:]
    frames[0].save(data, "WEBP", save_all=True, append_images=rest, duration=durations, loop=0, quality=88, method=5)
    return data.getvalue()


def _label(
    draw: ImageDraw.ImageDraw, run: Run, *, left: int, right: int, middle: int, size: int, numbers: bool = True
) -> None:
    """Title and verdict from the left, numbers from the right, all centred on the line at y = middle."""
    title = _font(size)
    draw.text((left, middle), run.title, TEXT, title, anchor="lm")
    start = left + int(title.getlength(run.title)) + 12
    small = _font(round(size * 0.68))
    width = int(small.getlength(run.verdict)) + 18
    half = round(size * 0.56)
    draw.rounded_rectangle((start, middle - half, start + width, middle + half), radius=half, fill=run.colour)
    draw.text((start + width / 2, middle), run.verdict, (255, 255, 255), small, anchor="mm")
    if numbers:
        draw.text((right, middle), run.numbers, QUIET, _font(round(size * 0.8)), anchor="rm")


def _paste(picture: Image.Image, frame: np.ndarray, left: int, top: int, width: int, height: int) -> None:
    scaled = Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS)
    picture.paste(scaled, (left, top))
    ImageDraw.Draw(picture).rectangle((left, top, left + width - 1, top + height - 1), outline=EDGE)


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size=size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError(
            "This Pillow has no FreeType, so no font of any size but one. Reinstall Pillow from a wheel."
        )
    return font
