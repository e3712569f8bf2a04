"""The guard over ranks: a fault in one of them reroutes all, and all learn the same; with none, nothing is rerouted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.precision.learned import NOTHING
from rank_runs import Case, Fault, Made, in_ranks, run_cases, sampled
from tiers import drawn

FAULTS = drawn(50, 6)
SIZE = 2
VALUES = (math.nan, math.nan, math.inf, -math.inf, 65504.0)
OVERFLOWS = ("stream", "inside")


def layers_of(folder: Path) -> list[str]:
    from diffusers import CogVideoXTransformer3DModel

    network = CogVideoXTransformer3DModel.from_pretrained(folder, subfolder="transformer")
    named = [name for name, layer in network.named_modules() if [*layer.parameters(recurse=False)]]
    return sorted(named)


def drawn_faults(model: str, folder: Path) -> list[Case]:
    """Faults in half-precision calls of any layer, in one rank or in both."""
    draw, layers, cases = random.Random(22), layers_of(folder), []
    for _ in range(FAULTS):
        value, layer = draw.choice(VALUES), draw.choice(layers)
        ranks, call = draw.choice([(0,), (1,), (0, 1)]), draw.choice([0, 1, 2])
        fault = Fault(layer, ranks, call, value, None if math.isnan(value) else draw.random())
        cases.append(Case(model, folder, draw.choice(["bf16", "fp16"]), steps=3, fault=fault))
    return cases


@pytest.fixture(scope="module")
def found(model_folder: Callable[..., Path]) -> tuple[list[Case], list[list[Made]]]:
    cases = drawn_faults("5b", model_folder("5b"))
    cases += [Case("2b", model_folder("2b", overflow), "fp16", steps=3) for overflow in OVERFLOWS]
    cases += [Case("2b", model_folder("2b", "stream"), "fp16 (plain)")]
    return cases, in_ranks(SIZE, run_cases, cases)


def test_all_ranks_reroute_or_none(
    found: tuple[list[Case], list[list[Made]]], figure: Callable[[str, object], None]
) -> None:
    cases, by_rank = found
    rerouted = 0
    for number, case in enumerate(cases[:FAULTS]):
        made = [each[number] for each in by_rank]
        assert all(each.steps == made[0].steps for each in made), case
        assert all(each.learned == made[0].learned for each in made), case
        assert all(torch.equal(each.latents, made[0].latents) for each in made), case
        assert torch.isfinite(made[0].latents).all(), case
        outcomes = [outcome for _, outcome, _ in made[0].steps]
        happened = [each.happened for each in made]
        assert case.fault
        if any(happened) and math.isnan(case.fault.value):
            assert "rerun" in outcomes, case
        if not any(happened):
            assert outcomes == ["finite"] * len(outcomes), case
        rerouted += "rerun" in outcomes
    figure(f"drawn faults over {SIZE} ranks, rerouted on all ranks; none on some alone", f"{rerouted} of {FAULTS}")
    assert rerouted >= FAULTS / 3


@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_they_learn_what_one_process_learns(
    overflow: str, found: tuple[list[Case], list[list[Made]]], model_folder: Callable[..., Path]
) -> None:
    cases, by_rank = found
    number = FAULTS + OVERFLOWS.index(overflow)
    made, one = [each[number] for each in by_rank], sampled(cases[number])
    exact = sampled(Case("2b", model_folder("2b", overflow), steps=3)).latents
    assert all(each.learned == one.learned and torch.equal(each.latents, made[0].latents) for each in made)
    assert all(
        [(dtype, outcome) for dtype, outcome, _ in each.steps] == [(dtype, outcome) for dtype, outcome, _ in one.steps]
        for each in made
    )
    assert (one.learned != NOTHING) == (overflow == "inside")
    away, usual = ((each.latents - exact).square().mean().sqrt() for each in (made[0], one))
    assert away < 2 * usual


def test_what_is_only_watched_is_broken_on_all(found: tuple[list[Case], list[list[Made]]]) -> None:
    _, by_rank = found
    for each in by_rank:
        assert [outcome for _, outcome, _ in each[-1].steps] == ["non-finite"] * 2
        assert not torch.isfinite(each[-1].latents).all()
