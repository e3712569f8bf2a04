"""Runs in one picture: beside each other, or beside each other and moving."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox, TransformedBbox
from PIL import Image

Colour = tuple[int, int, int]

PAPER, EDGE, TEXT, QUIET = "#0d1117", "#30363d", "#f0f6fc", "#9198a1"
BAD: Colour = (218, 54, 51)
GOOD: Colour = (35, 134, 54)
NEUTRAL: Colour = (62, 71, 84)

GRID_WIDTH, CELL_WIDTH, MOVING_WIDTH = 1600, 312, 300  # px; at most
MARGIN, GAP = 28, 11  # px
HEAD, LABEL, LINE = 104, 44, 24  # px; heading and subheading, title of a run, a line of its numbers
SCALE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of difference maps, logarithmic; the same in every picture
SCALE_HEIGHT = 130  # px
NO_FRAMES = np.zeros((0, 1, 1, 3), np.uint8)  # of a run that failed


@dataclass(frozen=True)
class Run:
    """One video and what is said about it."""

    title: str
    verdict: str  # one or two words, shown on `colour`
    colour: Colour
    numbers: str
    frames: np.ndarray  # uint8 [frames, height, width, 3]


class Page:
    """A picture of equal cells in rows and columns, as high as frames of that width are. Sizes are pixels, which
    matplotlib's points are here: 72 of both are an inch."""

    def __init__(
        self,
        shape: tuple[int, int],
        frames: np.ndarray,
        width: int,
        *,
        head: int = LABEL,
        foot: int = 40,
        between: int = GAP,
        lowest: int = 0,
    ) -> None:
        rows, columns = shape
        self.cell_height = max(round(width * frames.shape[1] / frames.shape[2]), lowest)
        self.width = 2 * MARGIN + columns * (width + GAP) - GAP
        self.height = head + rows * (self.cell_height + between) - between + foot
        self.figure = Figure((self.width / 72, self.height / 72), dpi=72, facecolor=PAPER)
        self.cells: np.ndarray = self.figure.subplots(
            rows,
            columns,
            squeeze=False,
            subplot_kw={"xticks": [], "yticks": [], "facecolor": PAPER},
            gridspec_kw={
                "left": MARGIN / self.width,
                "right": 1 - MARGIN / self.width,
                "top": 1 - head / self.height,
                "bottom": foot / self.height,
                "wspace": GAP / width,
                "hspace": between / self.cell_height,
            },
        )
        for cell in self.cells.flat:
            cell.spines[:].set_color(EDGE)

    def write(self, down: float, words: str, size: int, colour: str = QUIET) -> None:
        """A line from the left margin, centred that far below the picture's upper edge."""
        place = MARGIN / self.width, 1 - down / self.height
        self.figure.text(*place, words, fontsize=size, color=colour, va="center", parse_math=False)

    def drawn(self) -> Image.Image:
        canvas = FigureCanvasAgg(self.figure)
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def grid(
    runs: Sequence[Run],
    differences: Sequence[np.ndarray | None],
    *,
    frame: int,
    heading: str,
    subheading: str,
    footnote: str,
) -> Image.Image:
    """One column for each run: a frame, what differs in it from the reference, and `numbers` in lines of their own.

    differences: [height, width], NaN where there is none; None for the reference, in whose place the scale stands. A
        run without frames failed: its `numbers` stand in place of its picture.
    """
    whole = [run for run in runs if len(run.frames)]
    width = min(CELL_WIDTH, (GRID_WIDTH - 2 * MARGIN - (len(runs) - 1) * GAP) // len(runs))
    foot = GAP + max(len(run.numbers.splitlines()) for run in whole) * LINE + 46
    page = Page((2, len(runs)), whole[0].frames, width, head=HEAD + LABEL, foot=foot, lowest=SCALE_HEIGHT)
    for down, words, size, colour in ((40, heading, 32, TEXT), (76, subheading, 18, QUIET)):
        page.write(down, words, size, colour)
    page.write(page.height - 24, footnote, 14)
    for run, difference, (upper, lower) in zip(runs, differences, page.cells.T, strict=True):
        label(upper, run)
        if not len(run.frames):
            lines, fit = textwrap.wrap(run.numbers, width // 10), page.cell_height // LINE
            for cell, part in ((upper, lines[:fit]), (lower, lines[fit : 2 * fit])):
                _write(cell, "\n".join(part), right=12, down=12)
            continue
        upper.imshow(run.frames[frame], aspect="auto")
        if difference is None:
            _scale(lower)
        else:
            lower.imshow(_coloured(difference), aspect="auto")
        _write(lower, run.numbers, down=page.cell_height + GAP)
    return page.drawn()


def animation(runs: Sequence[Run], *, footnote: str) -> Iterator[Image.Image]:
    """The runs beside each other, one picture for each frame of the videos."""
    page = Page((1, len(runs)), runs[0].frames, MOVING_WIDTH)
    page.write(page.height - 20, footnote, 13)
    shown = [cell.imshow(run.frames[0], aspect="auto") for run, cell in zip(runs, page.cells[0], strict=True)]
    for run, cell in zip(runs, page.cells[0], strict=True):
        label(cell, run)
    for frames in zip(*(run.frames for run in runs), strict=False):
        for image, frame in zip(shown, frames, strict=True):
            image.set_data(frame)
        yield page.drawn()


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


def label(cell: Axes, run: Run) -> None:
    """A run's title above its cell, and its verdict behind it."""
    title = cell.set_title(run.title, loc="left", color=TEXT, fontsize=21, pad=14, parse_math=False)
    badge = {"boxstyle": "round,pad=0.35,rounding_size=0.8", "facecolor": np.divide(run.colour, 255), "linewidth": 0}
    cell.annotate(
        run.verdict, (1, 0.5), (19, 0), title, "offset points", color="white", fontsize=14, va="center", bbox=badge
    )


def _coloured(difference: np.ndarray) -> np.ndarray:
    """uint8 [height, width, 3]; brighter is larger, NaN is grey."""
    return _colours().to_rgba(difference, bytes=True)[..., :3]


def _colours() -> ScalarMappable:
    grey = colormaps["inferno"].with_extremes(bad=to_hex(np.divide(NEUTRAL, 255).tolist()))
    return ScalarMappable(LogNorm(SCALE[0], SCALE[-1], clip=True), grey)


def _scale(cell: Axes) -> None:
    """The colours of difference maps, labelled, in the middle of a cell."""
    bar = cell.figure.colorbar(_colours(), cell.inset_axes((0.11, 0.45, 0.78, 0.12)), orientation="horizontal")
    bar.set_ticks(SCALE, labels=[f"{value:g}" for value in SCALE], color=QUIET, fontsize=13)
    bar.ax.minorticks_off()
    bar.ax.set_title("max |difference| of a pixel from fp32", color=QUIET, fontsize=13)
    bar.ax.set_xlabel(f"NaN is grey; black: {SCALE[0]:g} or less", color=QUIET, fontsize=13)


def _write(cell: Axes, words: str, *, right: int = 0, down: int) -> None:
    """Lines from a cell's upper left corner, cut where its column ends."""
    column = TransformedBbox(Bbox([(0, -9), (1, 9)]), cell.transAxes)
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    text = cell.annotate(words, (0, 1), (right, -down), va="top", color=QUIET, fontsize=15, linespacing=1.3, **place)
    text.set(clip_on=True, clip_box=column, parse_math=False)
