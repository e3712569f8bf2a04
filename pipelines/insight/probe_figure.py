"""Draws a probe: layers × steps and layers × blocks as heat maps, with the ends of fp16 and bf16 in the colour bar.

matplotlib is imported only to draw, and without pyplot, which would keep figures and choose a window system.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...precision.overrides import RANGE, covers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

    from ...precision.probe import Probed, ProbeResult

BLOCK, MOST_ROWS = "block output", 36
_LOWEST, _FP16, _BF16 = -2.0, math.log10(RANGE["fp16"]), math.log10(RANGE["bf16"])  # exponents of ten
_BELOW = 0.62  # share of the colour bar below fp16's end
_LONGEST = 56  # most characters of a name


Row = dict[int | str, float]  # max |x| of one layer: by step (over all blocks), and by block (over all steps)


def rows_of(probed: Probed, most: int = MOST_ROWS) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the `most` rows with the largest values, and the other rows; each by label, in the layers' order, with a
    block's output before its layers. The same layer of all blocks is one row."""
    found: dict[str, Row] = {}
    for index, step in enumerate(probed.steps):
        for name, values in step.items():
            block = next((block for block in probed.blocks if covers(block, name)), None)
            if block:
                found.setdefault(BLOCK, {})
            row = found.setdefault(name[len(block) + 1 :] or BLOCK if block else name, {})
            for place in (index, block) if block else (index,):
                row[place] = max(row.get(place, 0.0), probed.reach(name, values))
    largest = sorted(found, key=lambda label: -_reach(found[label]))[:most]
    shown = {label: row for label, row in found.items() if label in largest}
    return shown, {label: row for label, row in found.items() if label not in largest}


def _reach(row: Row) -> float:
    return max(row.values(), default=0.0)


def places(values: object, highest: float) -> np.ndarray:
    """Return positions 0..1 in the colour bar for values of max |x|; NaN for None. The scale is logarithmic, in three
    parts: up to fp16's end, from there to the largest value, and a short one up to bf16's end."""
    top = max(math.ceil(math.log10(max(highest, 1.0)) * 2) / 2, 6.0)
    with np.errstate(divide="ignore"):
        exponents = np.log10(np.array(values, dtype=float))
    return np.interp(exponents, [_LOWEST, _FP16, min(top, _BF16 - 1), _BF16], [0.0, _BELOW, 0.92, 1.0])


def draw(result: ProbeResult) -> np.ndarray:
    """Return the picture, uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure_of(result))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def figure_of(result: ProbeResult) -> Figure:
    from matplotlib.figure import Figure

    rows, hidden = rows_of(result.probed)
    labels = [*map(_fit, rows)]
    steps, blocks = range(len(result.probed.steps)), result.probed.blocks
    short = len({block.rpartition(".")[0] for block in blocks}) == 1
    block_names = [block.rpartition(".")[2] if short else block for block in blocks]
    highest = max(filter(math.isfinite, map(_reach, rows.values())), default=1.0)
    inches = [min(max(len(steps) * 0.3, 1.9), 4.5), min(max(len(blocks) * 0.25, 1.9), 6.0), 0.24, 4.6]
    width = max(map(len, labels), default=0) * 0.082 + sum(inches) + 1.9
    figure = Figure((width, max(len(rows) * 0.24, 6.5) + 2.2), dpi=110, layout="constrained")
    by_step, by_block, bar, words = figure.subplots(1, 4, width_ratios=inches)
    _heat(by_step, "by step", rows, highest, {step: str(step + 1) for step in steps})
    cells = _heat(by_block, "by block", rows, highest, dict(zip(blocks, block_names, strict=True)))
    by_block.set_yticks([])
    by_step.set_yticks(np.arange(len(rows)) + 0.5, labels, fontsize=9)
    for label, row in zip(by_step.get_yticklabels(), rows.values(), strict=True):
        label.set_color("black" if _reach(row) <= RANGE["fp16"] else "#b3001b")
    powers = range(int(_LOWEST), math.floor(math.log10(max(highest, 1e6))) + 1, 2)
    ticks = figure.colorbar(cells, cax=bar)
    ticks.set_ticks(places([10.0**e for e in powers], highest).tolist(), labels=[f"1e{e}" for e in powers])
    for words_at_end in ("fp16 ends: 65504", "bf16 ends: 3.4e38"):
        end = float(places(RANGE[words_at_end[:4]], highest))
        bar.axhline(end, color="black", linewidth=2)
        bar.text(-0.3, end, words_at_end, fontsize=8, rotation=90, ha="right", va="top")
    words.set_axis_off()
    words.text(0, 1, _words(result), va="top", fontsize=9, parse_math=False)
    left_out = f" {len(hidden)} more rows reach {max(map(_reach, hidden.values())):.3g} at most." if hidden else ""
    rule = "max |x| of every layer in fp32: by step over all blocks, by block over all steps."
    about = f"{result.model}, {result.sampled}. {result.cost}. {rule}{left_out}"
    figure.suptitle(textwrap.fill(result.headline, int(width * 7)), x=0.01, ha="left", fontsize=16)
    figure.supxlabel(textwrap.fill(about, int(width * 12)), x=0.01, ha="left", fontsize=9)
    return figure


def _heat(axes: Axes, title: str, rows: Mapping[str, Row], highest: float, columns: Mapping[Any, str]) -> QuadMesh:
    """Draw a heat map: blue below fp16's end and red above, distinct also in grey and to colour-blind users."""
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    below, names = round(_BELOW * 1000), [*columns.values()]
    blue = LinearSegmentedColormap.from_list("within", ["#f1f6fb", "#a9cbe8", "#3f86c4", "#0a3d74"])
    red = LinearSegmentedColormap.from_list("beyond", ["#ff9a3c", "#e0301e", "#5c0011"])
    colours = ListedColormap([*blue(np.linspace(0, 1, below)), *red(np.linspace(0, 1, 1000 - below))])
    cells = places([[row.get(column) for column in columns] for row in rows.values()], highest)
    every, upright = max(-(-len(names) // 8), 1), max(map(len, names), default=0) > 3  # at most 8 names
    axes.set_xticks(np.arange(len(names), step=every) + 0.5, names[::every], fontsize=9, rotation=90 * upright)
    axes.set_title(title, fontsize=10, loc="left")
    axes.invert_yaxis()
    return axes.pcolormesh(
        cells.reshape(len(rows), -1), cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=0.6
    )


def _words(result: ProbeResult) -> str:
    """Return the text beside the maps: the largest values, and what each precision needs."""
    lines = ["Largest values", ""]
    for entry in result.probed.worst():
        beyond = f", {entry.reach / RANGE['fp16']:.3g} × fp16's limit" if entry.reach > RANGE["fp16"] else ""
        lines += [_fit(entry.label), f"    {entry.reach:.3g} at step {entry.step + 1}{beyond}"]
    lines += ["", "What each precision needs", ""]
    for verdict in result.verdicts:
        lines += textwrap.wrap(verdict.plan, _LONGEST, subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines)


def _fit(name: str) -> str:
    """Return a name; if it is too long, without its middle."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 3]}…{name[_LONGEST // 3 + 1 - _LONGEST :]}"
