"""Draws a probe: layers × steps and layers × blocks as heat maps, with the ends of fp16 and bf16 in the colour bar.

matplotlib is imported when something is drawn. No pyplot: it would hold figures and choose a window system.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...precision.overrides import RANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ...precision.probe import Probed, ProbeResult

STREAM, BLOCK = "residual stream", "block output"
MOST_ROWS = 36
_INK, _GREY, _RED = "#1f2328", "#59636e", "#b3001b"
_LOWEST = -2  # exponent of ten; what is smaller has its colour
_FP16, _BF16 = math.log10(RANGE["fp16"]), math.log10(RANGE["bf16"])
_BELOW = 0.62  # of the colour bar: from its lower end to fp16's
_ROW, _LETTER, _LIST, _BAR = 0.24, 0.082, 4.6, 1.9  # inches
_LONGEST = 56  # letters of a name


@dataclass
class Row:
    """max |x| of one layer, the same one in all blocks; nothing where it did not run."""

    label: str
    by_step: dict[int, float] = field(default_factory=dict)  # of all blocks
    by_block: dict[str, float] = field(default_factory=dict)  # of all steps; empty outside of blocks

    @property
    def reach(self) -> float:
        return max(self.by_step.values(), default=0.0)


def rows_of(probed: Probed, most: int = MOST_ROWS) -> tuple[list[Row], list[Row]]:
    """Return rows in the order in which they ran, of a block's its output first: the `most` that reach most, and the
    others."""
    blocks, output = probed.anatomy.repeated, STREAM if probed.anatomy.stream else BLOCK
    found: dict[str, Row] = {}
    for index, step in enumerate(probed.steps):
        for name, values in step.items():
            block = next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)
            label = name[len(block) + 1 :] or output if block else name
            if block:
                found.setdefault(output, Row(output))
            row, reach = found.setdefault(label, Row(label)), probed.reach(name, values)
            row.by_step[index] = max(row.by_step.get(index, 0.0), reach)
            if block:
                row.by_block[block] = max(row.by_block.get(block, 0.0), reach)
    largest = {row.label for row in sorted(found.values(), key=lambda row: -row.reach)[:most]}
    rows = [*found.values()]
    return [row for row in rows if row.label in largest], [row for row in rows if row.label not in largest]


def draw(result: ProbeResult) -> np.ndarray:
    """uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure_of(result))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def figure_of(result: ProbeResult) -> Figure:
    from matplotlib.figure import Figure

    rows, hidden = rows_of(result.probed)
    steps, blocks = range(len(result.probed.steps)), result.probed.anatomy.repeated
    columns = _short(blocks)
    names = max([len(_fit(row.label)) for row in rows], default=0) * _LETTER
    widths = [min(max(len(steps) * 0.3, 1.9), 4.5), min(max(len(blocks) * 0.25, 1.9), 6.0), 0.24, _LIST]
    size = names + sum(widths) + _BAR, max(len(rows) * _ROW, 6.5) + 2.2
    figure = Figure(size, dpi=110, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.12)
    by_step, by_block, bar, words = figure.subplots(1, 4, width_ratios=widths)
    scale = _Scale(max([row.reach for row in rows if math.isfinite(row.reach)], default=1.0))
    _heat(by_step, [[row.by_step.get(step) for step in steps] for row in rows], scale)
    _heat(by_block, [[row.by_block.get(block) for block in blocks] for row in rows], scale)
    by_step.set_yticks(range(len(rows)), [_fit(row.label) for row in rows])
    for text, row in zip(by_step.get_yticklabels(), rows, strict=True):
        text.set(fontsize=9, **_style(row.reach))
    by_block.set_yticks([])
    _name_columns(by_step, [str(step + 1) for step in steps], "by step")
    _name_columns(by_block, columns, "by block")
    _colour_bar(bar, scale)
    _lists(words, result)
    headline = textwrap.fill(result.headline, int(size[0] * 7))
    figure.suptitle(headline, x=0.01, ha="left", fontsize=16, fontweight="bold", color=_INK)
    left_out = f" {len(hidden)} more rows reach {max(row.reach for row in hidden):.3g} at most." if hidden else ""
    rule = "max |x| of every layer, computed in fp32; by step of all blocks, by block of all steps."
    below = textwrap.fill(f"{result.model}, {result.sampled}. {result.cost}. {rule}{left_out}", int(size[0] * 12))
    figure.supxlabel(below, x=0.01, ha="left", fontsize=9, color=_GREY)
    return figure


class _Scale:
    """max |x| → 0..1: logarithmic up to where fp16 ends and from there to the largest value; what is left up to where
    bf16 ends is squeezed into the bar's last part."""

    def __init__(self, highest: float):
        top = max(math.ceil(math.log10(max(highest, 1.0)) * 2) / 2, 6.0)
        self.exponents = [_LOWEST, _FP16, min(top, _BF16 - 1), _BF16]

    def at(self, value: float | None) -> float:
        """NaN for nothing to show."""
        if value is None:
            return math.nan
        if not math.isfinite(value):
            return 1.0
        return float(np.interp(math.log10(value) if value else _LOWEST, self.exponents, [0.0, _BELOW, 0.92, 1.0]))


def _colours() -> Any:
    """Blues up to where fp16 ends, and a jump to red there: told apart in grey and by the colour-blind too."""
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    blues = LinearSegmentedColormap.from_list("within", ["#f1f6fb", "#a9cbe8", "#3f86c4", "#0a3d74"])
    reds = LinearSegmentedColormap.from_list("beyond", ["#ff9a3c", "#e0301e", "#5c0011"])
    within = round(_BELOW * 1000)
    return ListedColormap([*blues(np.linspace(0, 1, within)), *reds(np.linspace(0, 1, 1000 - within))])


def _heat(axes: Axes, values: Sequence[Sequence[float | None]], scale: _Scale) -> None:
    cells = np.array([[scale.at(value) for value in row] for row in values], dtype=float)
    axes.imshow(cells, cmap=_colours(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(0.5, cells.shape[1] - 1), minor=True)
    axes.set_yticks(np.arange(0.5, cells.shape[0] - 1), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _name_columns(axes: Axes, labels: Sequence[str], title: str) -> None:
    long = max(map(len, labels), default=0) > 3
    every = 1 if long else math.ceil(len(labels) / 16)
    shown = range(0, len(labels), max(every, 1))
    axes.set_xticks(shown, [labels[i] for i in shown], fontsize=8, color=_GREY, rotation=90 if long else 0)
    axes.set_title(title, fontsize=9, color=_GREY, loc="left")


def _colour_bar(axes: Axes, scale: _Scale) -> None:
    axes.imshow(np.linspace(1, 0, 1000)[:, None], cmap=_colours(), vmin=0, vmax=1, aspect="auto", extent=(0, 1, 0, 1))
    exponents = range(_LOWEST, math.floor(scale.exponents[2]) + 1, 2)
    axes.set_yticks([scale.at(10.0**e) for e in exponents], [f"$10^{{{e}}}$" for e in exponents], fontsize=9)
    axes.set_xticks([])
    axes.set_title("max |x|", fontsize=9, color=_GREY)
    for dtype, label in (("fp16", "fp16 ends: 65504"), ("bf16", "bf16 ends: 3.4e38")):
        place = scale.at(RANGE[dtype])
        axes.plot([-0.2, 1.35], [place, place], color=_INK, linewidth=2, clip_on=False)
        axes.text(1.6, place, label, fontsize=8, fontweight="bold", va="center", color=_INK)
    axes.plot([-0.3, 1.3], [0.935, 0.955], color="white", linewidth=4, clip_on=False)  # the scale changes here
    axes.spines[:].set_visible(False)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _lists(axes: Axes, result: ProbeResult) -> None:
    heading, quiet = {"fontsize": 11, "fontweight": "bold", "color": _INK}, {"fontsize": 8, "color": _GREY}
    lines: list[tuple[str, dict[str, Any]]] = [("Largest values", heading)]
    for entry in result.probed.worst():
        lines.append((_fit(result.name_of(entry)), {"fontsize": 9, **_style(entry.reach)}))
        beyond = f", {entry.reach / RANGE['fp16']:.3g} × where fp16 ends" if entry.reach > RANGE["fp16"] else ""
        lines.append((f"{entry.reach:.3g} at step {entry.step + 1}{beyond}", quiet))
    lines += [("", quiet), ("What each precision needs", heading)]
    for verdict in result.verdicts:
        needs = verdict.plan.removeprefix(verdict.dtype).strip() or "fits"
        emulated = verdict.dtype == "bf16" and not result.architecture.native_bf16
        words = f"{verdict.dtype}: {needs}{f', but {result.architecture} has no native bf16' if emulated else ''}"
        wrapped = textwrap.wrap(words, _LONGEST, subsequent_indent="    ", break_long_words=False)
        lines += [(line, {"fontsize": 9, "color": _INK}) for line in wrapped]
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(max(len(lines), 30), 0))
    for place, (text, style) in enumerate(lines):
        axes.text(0, place + 0.5, text, va="center", **style)


def _style(reach: float) -> dict[str, str]:
    return {"color": _INK} if reach <= RANGE["fp16"] else {"color": _RED, "fontweight": "bold"}


def _fit(name: str) -> str:
    """The middle left out where it is too long: beginning and end tell most."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 3]}…{name[_LONGEST // 3 + 1 - _LONGEST :]}"


def _short(blocks: Sequence[str]) -> list[str]:
    """Numbers alone where all blocks are of one list."""
    lists = {block.rpartition(".")[0] for block in blocks}
    return [block.rpartition(".")[2] for block in blocks] if len(lists) == 1 else list(blocks)
