"""A stage of a run: its policy, its report, and the guard it makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.precision.after_failure import HalfPrecisionForward
from comfyui_onediff_guard.precision.arch import named
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
def test_precision_sets_failure_policy_and_learning(precision: str, on_failure: OnFailure, learns: bool) -> None:
    made = stage(precision)
    assert (made.policy.on_failure, made.learns) == (on_failure, learns)


def test_tf32_is_used_where_available_unless_exact_fp32() -> None:
    assert stage("fp16").tf32
    assert not stage("fp16", GuardPolicy(exact_fp32=True)).tf32
    assert not stage("fp16", card="sm75").tf32


def test_report_shows_protection_of_the_latest_attempt() -> None:
    made, layer = stage("fp16"), torch.nn.Linear(2, 2)

    def build(known: PrecisionOverrides) -> HalfPrecisionForward:
        return HalfPrecisionForward(torch.relu, torch.relu, all_layers_scaled=known.all_layers_scaled)

    for known in (NOTHING, PrecisionOverrides(all_layers_scaled=True)):
        made.guard(layer, made.learner(layer, build, known))(torch.ones(1, 2))
        assert bool(made.report.protection) == known.all_layers_scaled


def test_guard_of_a_stage_recomputes_with_the_original_module() -> None:
    layer = torch.nn.Linear(2, 2)
    made = replace(stage("fp16"), inputs=("input",))
    guard = made.guard(layer, lambda input: torch.full((1, 2), torch.inf, dtype=torch.float16))  # noqa: A006
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert torch.equal(guard(input=x), layer(x))
    assert [step.outcome for step in made.report.steps] == ["rerun"]
