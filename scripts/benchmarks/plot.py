"""Plots on a logarithmic axis, drawn with Pillow: it is there anyway, and its own font needs no file.

Sizes are in pixels of the finished picture; it is drawn at twice that, and scaled down, for smooth lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Point = tuple[float, float]

PAPER, INK, GREY, RULE = (255, 255, 255), (31, 35, 40), (101, 109, 118), (222, 226, 230)
BLUE, VERMILLION, PURPLE = (0, 114, 178), (213, 94, 0), (150, 75, 130)  # told apart by the colour-blind too

TICK, LABEL, TITLE = 24, 25, 27  # font sizes
_FINER = 2


class Figure:
    def __init__(self, width: int, height: int):
        self._canvas = Image.new("RGB", (width * _FINER, height * _FINER), PAPER)
        self._draw = ImageDraw.Draw(self._canvas, "RGBA")

    def image(self) -> Image.Image:
        """With 128 colours, which is enough for lines and makes a small file."""
        width, height = self._canvas.size
        scaled = self._canvas.resize((width // _FINER, height // _FINER), Image.Resampling.LANCZOS)
        return scaled.quantize(128, dither=Image.Dither.NONE)

    def text(self, x: float, y: float, text: str, colour: Colour = INK, size: int = LABEL, anchor: str = "lm") -> float:
        """Returns the text's width."""
        font = ImageFont.load_default(size * _FINER)
        self._draw.text((x * _FINER, y * _FINER), text, colour, font, anchor=anchor)
        return font.getlength(text) / _FINER

    def power_of_ten(self, right: float, y: float, exponent: int) -> None:
        raised = self.text(right, y - 9, str(exponent), GREY, 17, anchor="rm")
        self.text(right - raised - 1, y, "10", GREY, TICK, anchor="rm")

    def line(self, points: Iterable[Point], colour: Colour, width: float = 1.5, dash: float = 0) -> None:
        finer = [(x * _FINER, y * _FINER) for x, y in points]
        if not dash:
            self._draw.line(finer, colour, round(width * _FINER), joint="curve")
            return
        ((left, y), (right, _)) = finer
        for start in range(round(left), round(right), round(2 * dash * _FINER)):
            self._draw.line([(start, y), (min(start + dash * _FINER, right), y)], colour, round(width * _FINER))

    def polygon(self, points: Iterable[Point], colour: Colour, opacity: float = 1.0) -> None:
        self._draw.polygon([(x * _FINER, y * _FINER) for x, y in points], (*colour, round(255 * opacity)))

    def mark(self, at: Point, colour: Colour, shape: str) -> None:
        x, y = at[0] * _FINER, at[1] * _FINER
        r = 7 * _FINER
        if shape == "circle":
            self._draw.ellipse((x - r, y - r, x + r, y + r), colour, PAPER, _FINER)
        elif shape == "square":
            self._draw.rectangle((x - r, y - r, x + r, y + r), colour, PAPER, _FINER)
        elif shape == "diamond":
            r *= 1.25
            self._draw.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], colour, PAPER, _FINER)
        elif shape == "ring":
            r *= 2
            self._draw.ellipse((x - r, y - r, x + r, y + r), None, INK, 2 * _FINER)


class Plot:
    """One pair of axes: x linear, y logarithmic. Methods take values, and draw what lies within the axes."""

    def __init__(
        self, figure: Figure, box: tuple[int, int, int, int], x: Point, y: Point, *, title: str, x_label: str
    ):  # box: left, top, right, bottom
        self._figure = figure
        self._left, self._top, self._right, self._bottom = box
        self._x, self._y = x, y
        figure.text(self._left, self._top - 26, title, INK, TITLE)
        figure.text((self._left + self._right) / 2, self._bottom + 66, x_label, INK, LABEL, anchor="mm")

    def axes(self, x_ticks: Sequence[int], exponents: Sequence[int], *, powers: bool = False) -> None:
        """powers: a value of x is an exponent of ten, and is written so."""
        for exponent in exponents:
            y = self._at(0, 10.0**exponent)[1]
            self._figure.line([(self._left, y), (self._right, y)], RULE, 1)
            self._figure.power_of_ten(self._left - 12, y, exponent)
        for tick in x_ticks:
            x, y = self._at(tick, 1)[0], self._bottom + 26
            if powers:
                self._figure.power_of_ten(x + 20, y, tick)
            else:
                self._figure.text(x, y, str(tick), GREY, TICK, anchor="mm")
        self._figure.line([(self._left, self._top), (self._left, self._bottom), (self._right, self._bottom)], INK, 1.5)

    def area(self, x: Point, y: Point, colour: Colour, opacity: float) -> None:
        (left, bottom), (right, top) = self._at(x[0], y[0]), self._at(x[1], y[1])
        self._figure.polygon([(left, bottom), (right, bottom), (right, top), (left, top)], colour, opacity)

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], colour: Colour) -> None:
        points = [*map(self._at, xs, highs), *map(self._at, reversed(xs), reversed(lows))]
        self._figure.polygon(points, colour, 0.18)

    def curve(self, xs: Sequence[float], ys: Sequence[float], colour: Colour, shape: str) -> None:
        """Values that are not finite are left out."""
        points = [self._at(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        self._figure.line(points, colour, 3)
        for point in points:
            self._figure.mark(point, colour, shape)

    def limit(self, y: float, colour: Colour = INK) -> None:
        height = self._at(0, y)[1]
        self._figure.line([(self._left, height), (self._right, height)], colour, 2, dash=9)

    def mark(self, x: float, y: float, colour: Colour, shape: str) -> None:
        self._figure.mark(self._at(x, y), colour, shape)

    def note(self, x: float, y: float, text: str, colour: Colour, anchor: str = "lm", *, up: float = 0) -> None:
        """Text at a value; `up`: pixels above it."""
        px, py = self._at(x, y)
        self._figure.text(px, py - up, text, colour, LABEL, anchor)

    def _at(self, x: float, y: float) -> Point:
        across = (x - self._x[0]) / (self._x[1] - self._x[0])
        low, high = math.log10(self._y[0]), math.log10(self._y[1])
        up = (math.log10(y) - low) / (high - low)
        return self._left + across * (self._right - self._left), self._bottom - up * (self._bottom - self._top)
