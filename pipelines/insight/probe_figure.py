"""Draws a probe: layers × steps and layers × blocks as heat maps, with the ends of fp16 and bf16 in the colour bar.

matplotlib is imported when something is drawn. No pyplot: it would hold figures and choose a window system.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...precision.overrides import RANGE
from ...precision.probe_result import WORST
from .probe_rows import Row, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ...precision.probe_result import Probing

DPI = 110
_INK, _GREY, _RED = "#1f2328", "#59636e", "#b3001b"
_LOWEST = -2  # exponent of ten; what is smaller has its colour
_FP16, _BF16 = math.log10(RANGE["fp16"]), math.log10(RANGE["bf16"])
_BELOW = 0.62  # of the colour bar: from its lower end to fp16's
_ROW, _HEAD, _FOOT, _GAP, _BAR, _LIST = 0.24, 1.5, 0.6, 0.25, 1.75, 4.6  # inches
_LETTER = 0.082  # inches, on average
_LONGEST = 56  # letters of a name


def draw(probing: Probing) -> np.ndarray:
    """uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure_of(probing))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def figure_of(probing: Probing) -> Figure:
    from matplotlib.figure import Figure

    rows, steps = rows_of(probing.probed), range(len(probing.probed.steps))
    labels = [_fit(row.label) for row in rows.rows]
    blocks = _short(rows.blocks)
    long = max(map(len, blocks), default=0)
    names, foot = 0.3 + max(map(len, labels), default=0) * _LETTER, _FOOT + (long * _LETTER if long > 3 else 0)
    by_step, by_block = _width(len(steps), 0.3, 4.5), _width(len(blocks), 0.17 if long <= 3 else 0.25, 6.0)
    height = max(len(rows.rows) * _ROW, 6.3)
    bar = names + by_step + _GAP + by_block + 3 * _GAP
    size = bar + _BAR + _LIST, _HEAD + height + foot
    figure = Figure(figsize=size, dpi=DPI, facecolor="white")

    def axes(left: float, width: float) -> Axes:
        return figure.add_axes((left / size[0], foot / size[1], width / size[0], height / size[1]))

    def write(left: float, down: float, text: str, **style: Any) -> None:
        """Inches from the upper left corner."""
        figure.text(left / size[0], 1 - down / size[1], text, **{"fontsize": 9, "color": _GREY} | style)

    scale = _Scale(max([row.reach for row in rows.rows if math.isfinite(row.reach)], default=1.0))
    left = axes(names, by_step)
    _heat(left, [[row.by_step.get(step) for step in steps] for row in rows.rows], scale)
    _name_rows(left, labels, rows.rows)
    _name_columns(left, [str(step + 1) for step in steps], "by step")
    right = axes(names + by_step + _GAP, by_block)
    _heat(right, [[row.by_block.get(block) for block in rows.blocks] for row in rows.rows], scale)
    right.set_yticks([])
    _name_columns(right, blocks, "by block")
    _colour_bar(axes(bar, 0.24), scale)
    what = f"{probing.model}, {probing.sampled}. {probing.cost}."
    large = 16 if len(probing.headline) < 88 else 11
    write(0.15, 0.42, probing.headline, fontsize=large, fontweight="bold", color=_INK)
    write(0.15, 0.72, what, fontsize=10)
    rule = "max |x| of every layer, computed in fp32; by step of all blocks, by block of all steps"
    write(0.15, 0.97, rule, fontsize=10)
    if rows.left_out:
        write(0.15, size[1] - 0.2, f"{rows.left_out} more rows reach {rows.below:.3g} at most")
    _lists(write, probing, bar + _BAR)
    return figure


class _Scale:
    """max |x| → 0..1: logarithmic up to where fp16 ends and from there to the largest value; what is left up to where
    bf16 ends is squeezed into the bar's last part."""

    def __init__(self, highest: float):
        top = max(math.ceil(math.log10(max(highest, 1.0)) * 2) / 2, 6.0)
        self.exponents = [_LOWEST, _FP16, min(top, _BF16 - 1), _BF16]
        self.places = [0.0, _BELOW, 0.92, 1.0]

    def at(self, value: float | None) -> float:
        """NaN for nothing to show."""
        if value is None:
            return math.nan
        if not math.isfinite(value):
            return 1.0
        return float(np.interp(math.log10(value) if value else _LOWEST, self.exponents, self.places))


def _colours() -> Any:
    """Blues up to where fp16 ends, and a jump to red there: told apart in grey and by the colour-blind too."""
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    blues = LinearSegmentedColormap.from_list("within", ["#f1f6fb", "#a9cbe8", "#3f86c4", "#0a3d74"])
    reds = LinearSegmentedColormap.from_list("beyond", ["#ff9a3c", "#e0301e", "#5c0011"])
    within = round(_BELOW * 1000)
    return ListedColormap([*blues(np.linspace(0, 1, within)), *reds(np.linspace(0, 1, 1000 - within))]).with_extremes(
        bad="white"
    )


def _heat(axes: Axes, values: Sequence[Sequence[float | None]], scale: _Scale) -> None:
    cells = np.array([[scale.at(value) for value in row] for row in values], dtype=float)
    axes.imshow(cells, cmap=_colours(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(0.5, cells.shape[1] - 1), minor=True)
    axes.set_yticks(np.arange(0.5, cells.shape[0] - 1), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _name_rows(axes: Axes, labels: Sequence[str], rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), labels)
    for text, row in zip(axes.get_yticklabels(), rows, strict=True):
        text.set(fontsize=9, **_style(row.reach))


def _name_columns(axes: Axes, labels: Sequence[str], title: str) -> None:
    long = max(map(len, labels), default=0) > 3
    every = 1 if long else max(1, math.ceil(len(labels) / 16))
    shown = range(0, len(labels), every)
    axes.set_xticks(shown, [labels[i] for i in shown], fontsize=8, color=_GREY, rotation=90 if long else 0)
    axes.set_title(title, fontsize=9, color=_GREY, loc="left")


def _colour_bar(axes: Axes, scale: _Scale) -> None:
    axes.imshow(np.linspace(1, 0, 1000)[:, None], cmap=_colours(), vmin=0, vmax=1, aspect="auto", extent=(0, 1, 0, 1))
    exponents = range(_LOWEST, math.floor(scale.exponents[2]) + 1, 2)
    axes.set_yticks([scale.at(10.0**e) for e in exponents], [f"$10^{{{e}}}$" for e in exponents], fontsize=9)
    axes.tick_params(axis="y", length=2, color=_GREY, labelcolor=_GREY)
    axes.set_xticks([])
    axes.set_title("max |x|", fontsize=9, color=_GREY)
    ends = (
        (RANGE["fp16"], "fp16 ends: 65504"),
        (RANGE["fp16"] / 8, "1/8 of that"),
        (RANGE["bf16"], "bf16 ends: 3.4e38"),
    )
    for value, label in ends:
        place, weight = scale.at(value), "bold" if "ends" in label else "normal"
        axes.plot([-0.2, 1.35], [place, place], color=_INK, linewidth=2 if "ends" in label else 1, clip_on=False)
        axes.text(1.6, place, label, fontsize=8, fontweight=weight, va="center", color=_INK)
    axes.plot([-0.3, 1.3], [0.935, 0.955], color="white", linewidth=4, clip_on=False)  # the scale changes here
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _lists(write: Callable[..., None], probing: Probing, left: float) -> None:
    write(left, _HEAD - 0.09, "Largest values", fontsize=11, fontweight="bold", color=_INK)
    down = _HEAD
    for entry in probing.probed.worst(WORST):
        part = entry.reach / RANGE["fp16"]
        said = f"{part:.3g} × where fp16 ends" if part > 1 else f"{_percent(part)} of fp16's range"
        write(left, down + 0.17, _fit(probing.name_of(entry)), **_style(entry.reach))
        write(left, down + 0.34, f"{entry.reach:.3g} at step {entry.step + 1}, {said}", fontsize=8)
        down += 0.42
    write(left, down + 0.4, "What each precision needs", fontsize=11, fontweight="bold", color=_INK)
    for need in probing.needs():
        for line in textwrap.wrap(need, _LONGEST, subsequent_indent="    ", break_long_words=False):
            down += 0.2
            write(left, down + 0.42, line, color=_INK)


def _style(reach: float) -> dict[str, str]:
    return {"color": _INK} if reach <= RANGE["fp16"] else {"color": _RED, "fontweight": "bold"}


def _percent(part: float) -> str:
    return f"{part:.1%}" if part >= 0.0005 else "less than 0.1%"


def _fit(name: str) -> str:
    """The middle left out where it is too long: beginning and end tell most."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 3]}…{name[_LONGEST // 3 + 1 - _LONGEST :]}"


def _short(blocks: Sequence[str]) -> list[str]:
    """Numbers alone where all blocks are of one list."""
    lists = {block.rpartition(".")[0] for block in blocks}
    return [block.rpartition(".")[2] for block in blocks] if len(lists) == 1 else list(blocks)


def _width(columns: int, each: float, most: float) -> float:
    return min(max(columns * each, 1.9), most)
