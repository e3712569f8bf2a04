"""A stage of a run: its policy, what it reports, and the guard that it makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.precision.arch import named
from comfyui_onediff_guard.precision.fallback import HalfPrecisionForward
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure, Scope, Stage
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides
from guards import report_of

LEARNED = GuardPolicy(scope=Scope.LEARNED)


def stage(precision: str, policy: GuardPolicy = LEARNED, card: str = "sm80") -> Stage:
    report = report_of(precision, "CogVideoX-2B", card)
    return Stage(report.plan, report, named(card), policy)


@pytest.mark.parametrize(
    ("precision", "on_failure", "learns"),
    [
        ("fp16", OnFailure.RERUN, True),
        ("bf16", OnFailure.RERUN, True),
        ("fp16 (plain)", OnFailure.OFF, False),
        ("fp32", OnFailure.RERUN, False),
    ],
)
def test_what_is_not_guarded_is_watched_and_learns_nothing(precision: str, on_failure: OnFailure, learns: bool) -> None:
    made = stage(precision)
    assert (made.policy.on_failure, made.learns) == (on_failure, learns)


def test_tf32_is_for_cards_that_have_it_unless_strict() -> None:
    assert stage("fp16").tf32
    assert not stage("fp16", GuardPolicy(exact_fp32=True)).tf32
    assert not stage("fp16", card="sm75").tf32


def test_the_report_says_what_of_the_latest_attempt_is_float32() -> None:
    made, layer = stage("fp16"), torch.nn.Linear(2, 2)

    def build(known: PrecisionOverrides) -> HalfPrecisionForward:
        return HalfPrecisionForward(torch.relu, torch.relu, all_layers_scaled=known.all_layers_scaled)

    for known in (NOTHING, PrecisionOverrides(all_layers_scaled=True)):
        made.guard(layer, made.learner(layer, build, known))(torch.ones(1, 2))
        assert bool(made.report.protection) == known.all_layers_scaled


def test_a_guard_has_what_the_stage_has_and_reruns_the_original() -> None:
    layer = torch.nn.Linear(2, 2)
    made = replace(stage("fp16"), inputs=("input",))
    guard = made.guard(layer, lambda input: torch.full((1, 2), torch.inf, dtype=torch.float16))  # noqa: A006
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert torch.equal(guard(input=x), layer(x))
    assert [step.outcome for step in made.report.steps] == ["rerun"]
