"""The probe's picture: rows that are few enough, cells that are right, texts that can be read."""

from __future__ import annotations

import numpy as np
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.insight.probe_figure import BLOCK, draw, rows_of
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.overrides import Peak
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.probe import Probed, ProbeResult, judge


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


def test_what_overflows_is_red_and_nothing_else():
    def red(picture: np.ndarray) -> int:
        r, b = (picture[400:, 200:900, i].astype(int) for i in (0, 2))
        return int(((r > 150) & (r > b + 100)).sum())

    assert red(draw(result_of(measured(30, 20, 4)))) == 0
    one = measured(30, 20, 4, value=lambda block, leaf, step: 2e5 if (block, leaf) == (17, 9) else 1.0)
    assert red(draw(result_of(one))) > 500


def test_matplotlib_is_loaded_when_something_is_drawn(fresh_python):
    code = "import sys\nimport comfyui_onediff_guard.pipelines.insight.probe_figure\nprint('matplotlib' in sys.modules)"
    assert fresh_python(code).strip() == "False"
