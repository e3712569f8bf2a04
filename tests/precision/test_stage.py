"""A stage of a run: its policy, its report, and the guard it makes."""

from __future__ import annotations

from dataclasses import replace

import torch
from comfyui_onediff_guard.precision.arch import named
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope, Stage
from guards import report_of

LEARNED = GuardPolicy(scope=Scope.LEARNED)


def stage(precision: str, policy: GuardPolicy = LEARNED, card: str = "sm80") -> Stage:
    report = report_of(precision, "CogVideoX-2B", card)
    return Stage(report.plan, report, named(card), policy)


def test_tf32_is_used_where_available_unless_exact_fp32() -> None:
    assert stage("fp16").tf32
    assert not stage("fp16", GuardPolicy(exact_fp32=True)).tf32
    assert not stage("fp16", card="sm75").tf32


def test_guard_of_a_stage_recomputes_with_the_original_module() -> None:
    layer = torch.nn.Linear(2, 2)
    made = replace(stage("fp16"), inputs=("input",))
    guard = made.guard(layer, lambda input: torch.full((1, 2), torch.inf, dtype=torch.float16))  # noqa: A006
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert torch.equal(guard(input=x), layer(x))
    assert [step.outcome for step in made.report.steps] == ["rerun"]
