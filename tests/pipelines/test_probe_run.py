"""The numerics probe: no step fails with its recommendation. And its picture."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.insight.probe import keep_profile, probe
from comfyui_onediff_guard.pipelines.insight.probe_figure import BLOCK, draw, rows_of
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import ALL_LAYERS_SCALED, Peak, parse
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.probe import Probed, ProbeResult, judge
from small_runs import opened, picture, prompts

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")
LEARNED = GuardPolicy(scope=Scope.LEARNED)

PROTECTED = f"fp16 with {ALL_LAYERS_SCALED}"


def opened_on(card, model, overflow="none", precision="auto"):
    gc.collect()
    handle = opened(model, precision=precision, overflow=overflow)
    handle.store.learned.clear()
    return replace(handle, architecture=arch.named(card))


@pytest.mark.parametrize(
    ("variant", "overflow", "card", "precision", "plan"),
    [
        ("2b", "stream", "sm75", "fp16", PROTECTED),
        ("5b", "inside", "sm75", "fp16", PROTECTED),
        ("1.5", "stream", "sm75", "fp16", PROTECTED),
        ("5b", "stream", "sm80", "auto", "bf16"),
        ("2b", "stream", "sm75", "fp32", "fp32"),
    ],
    ids=["2b", "5b", "1.5", "a card with bf16", "stored in fp32"],
)
def test_run_with_recommended_plan_needs_no_rerun(variant, overflow, card, precision, plan):
    handle = opened_on(card, variant, overflow, precision)
    found = probe(handle, *prompts(handle), settings=SMALL)
    assert found.chosen.plan == plan
    assert PROTECTED in [verdict.plan for verdict in found.verdicts]
    assert found.to_apply == ("set precision to 'bf16'" if "bf16" in plan and plan != found.plan.dtype else "")
    assert bool(found.profile_text) is (plan != "fp32")
    profile = parse(found.profile_text, "it") if found.profile_text else None
    applied = replace(handle, policy=LEARNED, profile=profile)
    latents, report = sample(applied, *prompts(applied), settings=SMALL)
    assert [(step.dtype, step.outcome) for step in report.steps] == [(found.chosen.dtype, "finite")] * SMALL.steps
    assert torch.isfinite(latents).all() and bool(report.protection) is (found.chosen.dtype == "fp16")


def test_probe_measures_every_step_and_states_its_cost():
    handle = opened_on("sm75", "2b", "stream")
    denoiser = handle.store.module("transformer", "fp16")
    found = probe(handle, *prompts(handle), settings=SMALL)
    assert len(found.probed.steps) == SMALL.steps
    assert found.seconds > 0 and f"3 steps in {found.seconds:.3g} s" in found.text()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in denoiser.modules())
    assert handle.store.learned == {}, "measuring leaves no overrides"
    blocks = len(denoiser.transformer_blocks)
    assert {f"transformer_blocks.{i}" for i in range(blocks)} <= set(found.probed.steps[0])


def test_run_after_probe_is_bit_equal_to_run_before():
    handle = opened_on("sm75", "2b", precision="bf16")
    expected, _ = sample(handle, *prompts(handle), settings=SMALL)
    probe(handle, *prompts(handle), settings=SMALL)
    latents, _ = sample(handle, *prompts(handle), settings=SMALL)
    assert torch.equal(latents, expected)


def test_saved_profile_is_used_in_same_process(tmp_path):
    """tests/nodes/test_probe_node.py checks that it is saved."""
    handle = replace(opened_on("sm75", "svd", "inside", "fp16"), profiles=tmp_path / "profiles")
    settings, image = SampleSettings(64, 64, steps=2, seed=3, frames=2), picture(64, 64)
    found = probe(handle, None, None, settings, image=image)
    assert found.to_apply == "wire `profile` into the NaN Guard's `profile`, and set its scope to 'learned'"
    keep_profile(handle, found)
    _, report = sample(replace(handle, policy=LEARNED), None, None, settings, image=image)
    assert report.reruns == 0


# --- its picture: number of rows, values of cells, colours ------------------------------------------------------------


def measured(blocks: int, leaves: int, steps: int, *, lists: int = 1, value=lambda *_: 1.0):
    """Made-up measurements. value(block, leaf, step) → max |x|."""
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


def test_same_layer_of_all_blocks_is_one_row_and_largest_rows_stay():
    probed = measured(3, 2, 4, value=lambda block, leaf, step: 100 * (2 - block) + 10 * (leaf + 1) + step)
    rows, hidden = rows_of(probed)
    assert [*rows] == ["embed", BLOCK, "layers.0.linear", "layers.1.linear", "proj_out"] and hidden == {}
    steps, blocks = {0: 220, 1: 221, 2: 222, 3: 223}, {"blocks.0": 223, "blocks.1": 123, "blocks.2": 23}
    assert rows["layers.1.linear"] == steps | blocks, "the largest of all blocks, and of all steps"
    assert [*rows["embed"]] == [0, 1, 2, 3], "which is outside of blocks"
    rows, hidden = rows_of(measured(2, 3, 1, value=lambda block, leaf, _: leaf + 5.0), most=2)
    assert [*rows] == ["layers.1.linear", "layers.2.linear"] and len(hidden) == 4


def test_only_overflowing_cells_are_red():
    def red(picture: np.ndarray) -> int:
        r, b = (picture[400:, 200:900, i].astype(int) for i in (0, 2))
        return int(((r > 150) & (r > b + 100)).sum())

    assert red(draw(result_of(measured(30, 20, 4)))) == 0
    one = measured(30, 20, 4, value=lambda block, leaf, step: 2e5 if (block, leaf) == (17, 9) else 1.0)
    assert red(draw(result_of(one))) > 500


def test_importing_probe_figure_does_not_import_matplotlib(fresh_python):
    code = "import sys\nimport comfyui_onediff_guard.pipelines.insight.probe_figure\nprint('matplotlib' in sys.modules)"
    assert fresh_python(code).strip() == "False"
