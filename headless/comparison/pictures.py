"""Pictures of several runs side by side, still or animated."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_hex
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

PAPER, EDGE, TEXT, QUIET = "#0d1117", "#30363d", "#f0f6fc", "#9198a1"
BAD: Colour = (218, 54, 51)
GOOD: Colour = (35, 134, 54)
NEUTRAL: Colour = (62, 71, 84)

GRID_WIDTH, CELL_WIDTH, MOVING_WIDTH, SCALE_HEIGHT = 1600, 312, 300, 130  # px; largest widths, smallest height
MARGIN, GAP = 28, 11  # px
HEAD, LABEL, LINE, FOOT = 104, 44, 24, 46  # px; heading and subheading, title of a run, a line of its numbers, footnote
SCALE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of difference maps, logarithmic; the same in every picture
NO_FRAMES = np.zeros((0, 1, 1, 3), np.uint8)  # for a failed run


@dataclass(frozen=True)
class PicturedRun:
    """One run's video and its description."""

    title: str
    verdict: str  # one or two words, shown on `colour`
    colour: Colour
    numbers: str
    frames: np.ndarray  # uint8 [frames, height, width, 3]
    difference: np.ndarray | None = None  # a frame's difference from the reference, [height, width]; NaN if undefined

    def height(self, width: int) -> int:
        """Return the height of its frames, scaled to this width; px."""
        return round(width * self.frames.shape[1] / self.frames.shape[2])


class Page:
    """A dark picture. Positions are in pixels from its upper left corner; anything outside is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), PAPER)
        self._draw = ImageDraw.Draw(self.image)

    def head(self, heading: str, subheading: str, footnote: str) -> None:
        self.write(MARGIN, 40, heading, 32, TEXT)
        self.write(MARGIN, 76, subheading, 16)
        self.write(MARGIN, self.image.height - 24, footnote, 14)

    def write(self, x: float, y: float, words: str, size: int, colour: str = QUIET, anchor: str = "lm") -> None:
        """Write text. anchor: the point of the text at (x, y), as in Pillow."""
        self._draw.text((x, y), words, colour, _font(size), anchor, spacing=5)

    def label(self, x: float, y: float, run: PicturedRun) -> None:
        """Write a run's title, followed by its verdict."""
        self.write(x, y, run.title, 21, TEXT)
        x += self._draw.textlength(run.title, _font(21)) + 14
        end = x + self._draw.textlength(run.verdict, _font(14)) + 12
        self._draw.rounded_rectangle((x, y - 12, end, y + 11), 8, run.colour)
        self.write(x + 6, y, run.verdict, 14, "white")

    def show(self, x: int, y: int, pixels: np.ndarray, width: int, height: int) -> None:
        """Draw an image, scaled to width and height. pixels: uint8 [height, width, 3], of any size."""
        self.image.paste(Image.fromarray(pixels).resize((width, height)), (x, y))
        self._draw.rectangle((x, y, x + width - 1, y + height - 1), outline=EDGE)


def grid(runs: Sequence[PicturedRun], words: tuple[str, str, str], *, frame: int) -> Image.Image:
    """Draw one column per run: a frame, its difference from the reference, and the lines of `numbers`.

    runs: a run without a difference has the colour scale there. A run without frames failed: it has its `numbers` in
        place of its picture.
    words: heading, subheading, footnote.
    """
    whole = [run for run in runs if len(run.frames)]
    width = min(CELL_WIDTH, (GRID_WIDTH - 2 * MARGIN - (len(runs) - 1) * GAP) // len(runs))
    height = max(whole[0].height(width), SCALE_HEIGHT)
    lines = max(len(run.numbers.splitlines()) for run in whole)
    captions = LABEL + 2 * (height + GAP)
    page = Page(_across(len(runs), width) - GAP + MARGIN, HEAD + captions + lines * LINE + FOOT)
    page.head(*words)
    for number, run in enumerate(runs):
        column = Page(width, captions + lines * LINE)
        column.label(0, LABEL // 2, run)
        if len(run.frames):
            column.show(0, LABEL, run.frames[frame], width, height)
            if run.difference is None:
                column.image.paste(_scale(width, height), (0, LABEL + height + GAP))
            else:
                column.show(0, LABEL + height + GAP, _coloured(run.difference), width, height)
            column.write(0, captions, run.numbers, 15, anchor="la")
        else:
            column.write(0, LABEL, textwrap.fill(run.numbers, width // 9), 15, anchor="la")
        page.image.paste(column.image, (_across(number, width), HEAD))
    return page.image


def animation(runs: Sequence[PicturedRun], *, footnote: str) -> Iterator[Image.Image]:
    """Yield one picture for each frame of the videos, with the runs side by side."""
    width, height = MOVING_WIDTH, runs[0].height(MOVING_WIDTH)
    for frames in zip(*(run.frames for run in runs), strict=False):
        page = Page(_across(len(runs), width) - GAP + MARGIN, LABEL + height + FOOT)
        page.write(MARGIN, LABEL + height + FOOT // 2, footnote, 13)
        for number, (run, frame) in enumerate(zip(runs, frames, strict=True)):
            page.label(_across(number, width), LABEL // 2, run)
            page.show(_across(number, width), LABEL, frame, width, height)
        yield page.image


def png(picture: Image.Image) -> bytes:
    data = BytesIO()
    picture.save(data, "PNG", optimize=True)
    return data.getvalue()


def webp(pictures: Iterator[Image.Image], *, fps: float) -> bytes:
    """Encode an animated WEBP that loops forever and shows its last picture for a second."""
    first, *rest = pictures
    durations = [round(1000 / fps)] * len(rest) + [1000]
    data = BytesIO()
    first.save(data, "WEBP", save_all=True, append_images=rest, duration=durations, loop=0, quality=88, method=5)
    return data.getvalue()


def _across(number: int, width: int) -> int:
    """Return the left edge of a cell, px. number: its index. width: of every cell."""
    return MARGIN + number * (width + GAP)


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


def _coloured(difference: np.ndarray) -> np.ndarray:
    """Return a difference map as uint8 [height, width, 3]; brighter is larger, NaN is grey."""
    grey = mpl.colormaps["inferno"].with_extremes(bad=to_hex(np.divide(NEUTRAL, 255).tolist()))
    return ScalarMappable(LogNorm(SCALE[0], SCALE[-1], clip=True), grey).to_rgba(difference, bytes=True)[..., :3]


def _scale(width: int, height: int) -> Image.Image:
    """Draw the labelled colour scale of difference maps."""
    page, left, bar, middle = Page(width, height), round(width * 0.11), round(width * 0.78), height // 2
    page.show(left, middle - 12, _coloured(np.geomspace(SCALE[0], SCALE[-1], bar)[None]), bar, 24)
    for value, x in zip(SCALE, np.linspace(left, left + bar, len(SCALE)), strict=True):
        page.write(x, middle + 26, f"{value:g}", 13, anchor="mm")
    page.write(width / 2, middle - 28, "max |difference| of a pixel from fp32", 13, anchor="mm")
    page.write(width / 2, middle + 48, f"NaN is grey; black: {SCALE[0]:g} or less", 13, anchor="mm")
    return page.image
