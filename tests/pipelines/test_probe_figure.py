"""The probe's picture: rows that are few enough, cells that are right, texts that can be read."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.insight.probe_figure import BLOCK, draw, figure_of, places, rows_of
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.overrides import Peak
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.probe import Probed, ProbeResult, judge
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text


def measured(blocks: int, leaves: int, steps: int, *, lists: int = 1, value=lambda *_: 1.0):
    """Made up. value(block, leaf, step) → max |x|."""
    names = [f"part_{i}.blocks" for i in range(lists)] if lists > 1 else ["blocks"]
    paths = [f"{name}.{block}" for name in names for block in range(blocks)]
    found = []
    for step in range(steps):
        row = {"embed": value(0, 0, step)}
        for index, path in enumerate(paths):
            row |= {f"{path}.layers.{leaf}.linear": value(index, leaf, step) for leaf in range(leaves)}
            row[path] = value(index, -1, step)
        row["proj_out"] = value(0, 0, step)
        found.append({name: Peak(reach, reach) for name, reach in row.items()})
    return Probed(tuple(paths), tuple(found))


def result_of(probed: Probed) -> ProbeResult:
    card = arch.named("sm75")
    plan = choose(card, VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision.AUTO)
    sampled = "720×480, 49 frames, seed 0"
    return ProbeResult("CogVideoX-5b", card, plan, sampled, probed, 9.0, judge(probed, "fp16"), "")


def test_the_same_layer_of_all_blocks_is_one_row_and_of_too_many_the_largest_stay():
    probed = measured(3, 2, 4, value=lambda block, leaf, step: 100 * (2 - block) + 10 * (leaf + 1) + step)
    rows, hidden = rows_of(probed)
    assert [*rows] == ["embed", BLOCK, "layers.0.linear", "layers.1.linear", "proj_out"] and hidden == {}
    steps, blocks = {0: 220, 1: 221, 2: 222, 3: 223}, {"blocks.0": 223, "blocks.1": 123, "blocks.2": 23}
    assert rows["layers.1.linear"] == steps | blocks, "the largest of all blocks, and of all steps"
    assert [*rows["embed"]] == [0, 1, 2, 3], "which is outside of blocks"
    rows, hidden = rows_of(measured(2, 3, 1, value=lambda block, leaf, _: leaf + 5.0), most=2)
    assert [*rows] == ["layers.1.linear", "layers.2.linear"] and len(hidden) == 4


def test_the_scale_rises_and_ends_where_the_ranges_end():
    found = places([0.0, 1e-2, 1.0, 65504 / 8, 65504, 66000, 5e5, 1e6, 3e38, math.inf], 5e5).tolist()
    assert found == sorted(found) and found[0] == 0 and found[-1] == 1
    assert places([65504, 1e6], 5e5).tolist() == pytest.approx([0.62, 0.92])
    assert np.isnan(places([None], 5e5)).all() and places([1e36], 1e37) < 1


def test_what_overflows_is_red_and_nothing_else():
    def red(picture: np.ndarray) -> int:
        r, b = (picture[400:, 200:900, i].astype(int) for i in (0, 2))
        return int(((r > 150) & (r > b + 100)).sum())

    assert red(draw(result_of(measured(30, 20, 4)))) == 0
    one = measured(30, 20, 4, value=lambda block, leaf, step: 2e5 if (block, leaf) == (17, 9) else 1.0)
    assert red(draw(result_of(one))) > 500


@pytest.mark.parametrize(
    ("blocks", "leaves", "steps", "options"),
    [
        (30, 20, 4, {"value": lambda block, leaf, step: 10.0 ** (block % 7)}),
        (42, 20, 50, {"value": lambda block, leaf, step: 10.0 ** (leaf % 9 - 3)}),
        (2, 3, 1, {}),
        (8, 45, 4, {"lists": 3}),
        (60, 60, 2, {"value": lambda block, leaf, step: 1e30 * block}),
        (3, 2, 1, {"value": lambda block, leaf, step: 1e5 if leaf >= 0 else 1.0}),
    ],
    ids=["30 blocks of 20 layers", "50 steps", "little", "several lists", "huge", "three fallback blocks"],
)
def test_texts_are_inside_and_overlap_nowhere(blocks, leaves, steps, options):
    figure = figure_of(result_of(measured(blocks, leaves, steps, **options)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    width, height = canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for (one, a), (other, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert not (across > 1 and down > 2.5), f"'{one}' and '{other}'"
    assert {"fp16 ends: 65504", "bf16 ends: 3.4e38"} <= {text for text, _ in boxes}


def test_the_colour_bar_shows_every_colour_beside_its_number() -> None:
    figure = figure_of(result_of(measured(3, 2, 1, value=lambda *_: 5e5)))
    ticks = figure.axes[2].yaxis
    powers = [float(text.get_text()) for text in ticks.get_ticklabels()]
    assert [*ticks.get_ticklocs()] == places(powers, 5e5).tolist() and powers[-1] >= 1e4
    assert figure.axes[2].get_ylim() == (0, 1) and all(
        axes.collections[0].get_clim() == (0, 1) for axes in figure.axes[:2]
    )


def test_matplotlib_is_loaded_when_something_is_drawn(fresh_python):
    code = "import sys\nimport comfyui_onediff_guard.pipelines.insight.probe_figure\nprint('matplotlib' in sys.modules)"
    assert fresh_python(code).strip() == "False"


def test_it_opens_no_window_and_keeps_no_figure():
    assert "pyplot" not in Path(figure_of.__code__.co_filename).read_text().replace("No pyplot", "")
