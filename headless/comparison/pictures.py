"""Runs in one picture: below each other, beside each other, or beside each other and moving. Needs no font file."""

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
GRID_WIDTH, CELL_WIDTH = 1600, 312  # px; at most
MARGIN, GAP = 28, 11  # px
HEAD = 104  # px; heading and subheading
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


def still(runs: Sequence[Run], *, heading: str, subheading: str, footnote: str, columns: int = 5) -> Image.Image:
    """One row for each run: a line about it, and `columns` frames spread evenly over its video."""
    cell_width = (STILL_WIDTH - 2 * MARGIN - (columns - 1) * GAP) // columns
    cell_height = round(cell_width * runs[0].frames.shape[1] / runs[0].frames.shape[2])
    line, foot = 40, 58
    row = line + cell_height + 22
    picture = Image.new("RGB", (STILL_WIDTH, HEAD + len(runs) * row + foot), PAPER)
    draw = ImageDraw.Draw(picture)
    _head(draw, heading, subheading, STILL_WIDTH)
    for index, run in enumerate(runs):
        top = HEAD + index * row
        _label(draw, run, left=MARGIN, right=STILL_WIDTH - MARGIN, middle=top + line // 2 - 3, size=21)
        chosen = np.linspace(0, len(run.frames) - 1, columns).round().astype(int)
        for column, frame in enumerate(run.frames[chosen]):
            _paste(picture, frame, MARGIN + column * (cell_width + GAP), top + line, cell_width, cell_height)
    draw.text((MARGIN, picture.height - foot + 14), footnote, QUIET, _font(15))
    return picture


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
    height, width = next(run.frames.shape[1:3] for run in runs if len(run.frames))
    cell_width = min(CELL_WIDTH, (GRID_WIDTH - 2 * MARGIN - (len(runs) - 1) * GAP) // len(runs))
    cell_height = max(round(cell_width * height / width), SCALE_HEIGHT)
    line, text, foot = 44, 24, 46
    told = max(len(run.numbers.splitlines()) for run in runs if len(run.frames))
    total = 2 * MARGIN + len(runs) * cell_width + (len(runs) - 1) * GAP
    first, second = HEAD + line, HEAD + line + cell_height + GAP
    captions = second + cell_height + GAP
    picture = Image.new("RGB", (total, captions + told * text + foot), PAPER)
    draw = ImageDraw.Draw(picture)
    _head(draw, heading, subheading, total)
    for index, (run, difference) in enumerate(zip(runs, differences, strict=True)):
        left = MARGIN + index * (cell_width + GAP)
        right = left + cell_width
        _label(draw, run, left=left, right=right, middle=HEAD + line // 2 - 3, size=21, numbers=False)
        if not len(run.frames):
            draw.rectangle((left, first, right - 1, second + cell_height - 1), outline=EDGE)
            lines = _wrapped(run.numbers, _font(16), cell_width - 24)[: (2 * cell_height) // text]
            draw.multiline_text((left + 12, first + 12), "\n".join(lines), QUIET, _font(16), spacing=6)
            continue
        _paste(picture, run.frames[frame], left, first, cell_width, cell_height)
        if difference is None:
            _scale(picture, left, second, cell_width, cell_height)
        else:
            _paste(picture, _coloured(difference), left, second, cell_width, cell_height)
        for row, words in enumerate(run.numbers.splitlines()):
            draw.text((left, captions + row * text), _fitted(words, _font(16), cell_width), QUIET, _font(16))
    draw.text((MARGIN, picture.height - foot + 16), _fitted(footnote, _font(14), total - 2 * MARGIN), QUIET, _font(14))
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


def _head(draw: ImageDraw.ImageDraw, heading: str, subheading: str, width: int) -> None:
    for top, words, colour, font in ((24, heading, TEXT, _font(32)), (66, subheading, QUIET, _font(18))):
        draw.text((MARGIN, top), _fitted(words, font, width - 2 * MARGIN), colour, font)


def _coloured(difference: np.ndarray) -> np.ndarray:
    """uint8 [height, width, 3]; brighter is larger, NaN is grey."""
    from matplotlib import colormaps

    low, high = np.log10(SCALE[0]), np.log10(SCALE[-1])
    share = (np.log10(np.maximum(difference, SCALE[0])) - low) / (high - low)
    colours = (colormaps["inferno"](share.clip(0, 1))[..., :3] * 255).round().astype(np.uint8)
    return np.where(np.isnan(difference)[..., None], np.array(NEUTRAL, np.uint8), colours)


def _scale(picture: Image.Image, left: int, top: int, width: int, height: int) -> None:
    """The colours of difference maps, labelled, in the middle of a cell."""
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left, top, left + width - 1, top + height - 1), outline=EDGE)
    small = _font(15)
    start, length, above = left + 34, width - 68, top + height // 2 - 14
    draw.text((left + width / 2, above - 12), "max |difference| of a pixel from fp32", QUIET, small, anchor="ms")
    bar = _coloured(np.geomspace(SCALE[0], SCALE[-1], length)[None].repeat(18, 0))
    picture.paste(Image.fromarray(bar), (start, above))
    for index, value in enumerate(SCALE):
        at = start + index * (length - 1) / (len(SCALE) - 1)
        draw.line((at, above + 18, at, above + 23), QUIET)
        draw.text((at, above + 26), f"{value:g}", QUIET, small, anchor="mt")
    swatch = above + 52
    draw.rectangle((start, swatch, start + 12, swatch + 12), fill=NEUTRAL)
    draw.text((start + 20, swatch + 6), f"NaN      black: {SCALE[0]:g} or less", QUIET, small, anchor="lm")


def _fitted(words: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The words, cut where they would be wider than `width`."""
    if font.getlength(words) <= width:
        return words
    while words and font.getlength(f"{words}…") > width:
        words = words[:-1]
    return f"{words}…"


def _wrapped(words: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [_fitted(line, font, width) for line in lines]


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
