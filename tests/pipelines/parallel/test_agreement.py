"""The guard over ranks: a fault in one of them makes all recompute and learn the same. Without one, none recomputes.

This holds if they share tokens, halves of guidance, or chunks of frames.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.overrides import NOTHING
from rank_runs import Case, Fault, Made, run_cases, run_in_ranks, sampled
from small_runs import opened
from tiers import by_tier

FAULTS = by_tier(50, 6)
SIZE = 2
VALUES = (math.nan, math.nan, math.inf, -math.inf, 65504.0)
OVERFLOWS = {("2b", "stream"): False, ("2b", "inside"): False, ("svd", "inside"): True}  # whether overrides are learned
Shared = dict[str, tuple[tuple[str, ...], dict[str, Any]]]
SHARED: Shared = {  # what ranks share → models, settings of runs
    "tokens": (("5b",), {"guidance": 1.0}),
    "guidance": (("5b", "wan"), {}),
    "guidance and chunks of frames (Stable Video Diffusion)": (("svd",), {"size": (64, 64, 3), "chunk": 1}),
}


def layers_of(component: str, folder: Path) -> list[str]:
    network = opened(folder).store.module(component, "fp32")
    named = [name for name, layer in network.named_modules() if [*layer.parameters(recurse=False)]]
    return sorted(name for name in named if component != "vae" or name.startswith("decoder."))


def drawn_faults(models: Sequence[tuple[str, Path]], **more: Any) -> list[Case]:
    """Faults in half-precision calls of any layer, in one rank or in both."""
    draw, cases, layers = random.Random(22), [], {}
    for number in range(FAULTS):
        model, folder = models[number % len(models)]
        component = {"svd": draw.choice(["unet", "unet", "vae"])}.get(model, "transformer")
        if (model, component) not in layers:
            layers[model, component] = layers_of(component, folder)
        value, layer = draw.choice(VALUES), draw.choice(layers[model, component])
        ranks, call = draw.choice([(0,), (1,), (0, 1)]), draw.choice([0, 1] if component == "vae" else [0, 1, 2])
        fault = Fault(layer, ranks, call, value, None if math.isnan(value) else draw.random(), component)
        cases.append(Case(model, folder, draw.choice(["bf16", "fp16"]), steps=3, fault=fault, **more))
    return cases


@pytest.fixture(scope="module", params=SHARED)
def faulty(
    request: pytest.FixtureRequest, model_folder: Callable[..., Path]
) -> tuple[str, list[Case], list[list[Made]]]:
    """What ranks share, and what each made of each fault."""
    models, more = SHARED[request.param]
    cases = drawn_faults([(model, model_folder(model)) for model in models], **more)
    return request.param, cases, run_in_ranks(SIZE, run_cases, cases)


@pytest.fixture(scope="module")
def found(model_folder: Callable[..., Path]) -> tuple[list[Case], list[list[Made]]]:
    cases = [Case(model, model_folder(model, overflow), "fp16", steps=3) for model, overflow in OVERFLOWS]
    cases.append(Case("2b", model_folder("2b", "stream"), "fp16 (plain)"))
    return cases, run_in_ranks(SIZE, run_cases, cases)


def test_all_ranks_recompute_or_none(
    faulty: tuple[str, list[Case], list[list[Made]]], figure: Callable[[str, object], None]
) -> None:
    shared, cases, by_rank = faulty
    recomputed = 0
    for number, case in enumerate(cases):
        made = [each[number] for each in by_rank]
        assert all(each.steps == made[0].steps and each.decoding == made[0].decoding for each in made), case
        assert all(each.learned == made[0].learned for each in made), case
        assert all(torch.equal(each.latents, made[0].latents) for each in made), case
        assert torch.isfinite(made[0].latents).all(), case
        if (frames := made[0].frames) is not None:
            assert all(each.frames is not None and torch.equal(each.frames, frames) for each in made), case
            assert torch.isfinite(frames).all(), case
        reruns = [bool(note) for *_, note in (*made[0].steps, *made[0].decoding)]
        happened = [each.happened for each in made]
        assert case.fault
        if any(happened) and math.isnan(case.fault.value):
            assert any(reruns), case
        if not any(happened):
            assert not any(reruns), case
        recomputed += any(reruns)
    said = f"drawn faults over {SIZE} ranks that share {shared}, rerouted on all ranks; none on some alone"
    figure(said, f"{recomputed} of {FAULTS}")
    assert recomputed >= FAULTS / 4


@pytest.mark.parametrize(("model", "overflow"), OVERFLOWS)
def test_ranks_learn_same_overrides_as_one_process(
    model: str, overflow: str, found: tuple[list[Case], list[list[Made]]], model_folder: Callable[..., Path]
) -> None:
    cases, by_rank = found
    number = [*OVERFLOWS].index((model, overflow))
    made, one = [each[number] for each in by_rank], sampled(cases[number])
    exact = sampled(Case(model, model_folder(model, overflow), steps=3)).latents
    assert all(each.learned == one.learned and torch.equal(each.latents, made[0].latents) for each in made)
    assert all(
        [(dtype, outcome) for dtype, outcome, _ in each.steps] == [(dtype, outcome) for dtype, outcome, _ in one.steps]
        for each in made
    )
    assert (one.learned != NOTHING) == OVERFLOWS[model, overflow]
    distance, usual = ((each.latents - exact).square().mean().sqrt() for each in (made[0], one))
    assert distance < 2 * usual


def test_unguarded_failure_is_reported_on_all_ranks(found: tuple[list[Case], list[list[Made]]]) -> None:
    _, by_rank = found
    for each in by_rank:
        assert [outcome for _, outcome, _ in each[-1].steps] == ["non-finite"] * 2
        assert not torch.isfinite(each[-1].latents).all()
