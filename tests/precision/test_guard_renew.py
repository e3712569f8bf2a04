"""A call that fails in fp32 too is made once more, where the weights can be loaded anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped, OnFailure, Scope, StageGuard
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport

CPU = ARCHITECTURES["cpu"]


class Stage:
    """A linear layer of which the weights are stale, until `renew` has them right."""

    def __init__(self, weight: float = 2.0, **policy: Any):
        self.layer = torch.nn.Linear(4, 4, bias=False).half().requires_grad_(False)
        self.layer.weight.fill_(torch.nan)
        self.weight = weight
        self.renewed: list[torch.Tensor] = []
        dtype = policy.pop("dtype", "fp16")
        self.layer.to(DTYPES[dtype])
        plan = choose(CPU, VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision(dtype))
        self.report = RunReport("CogVideoX-5B", str(CPU), plan)
        self.guard: Callable[..., torch.Tensor] = StageGuard(
            "denoiser", self.layer, dtype=dtype, policy=GuardPolicy(**policy), report=self.report, renew=self.renew
        )

    def renew(self, given: torch.Tensor) -> bool:
        self.renewed.append(given)
        self.layer.weight.fill_(self.weight)
        return self.weight != 0


@pytest.mark.parametrize(
    ("dtype", "given", "outcome", "helped"),
    [
        ("fp16", 3.0, "finite", "after that fp16 was finite"),
        ("fp16", 3e4, "rerun", "and the step computed in fp32"),
        ("fp32", 3e4, "finite", "after that fp32 was finite"),
    ],
)
def test_the_report_says_what_helped(dtype: str, given: float, outcome: str, helped: str) -> None:
    stage = Stage(dtype=dtype)
    assert (stage.guard(torch.full((1, 4), given)) == 8 * given).all()
    assert [step.outcome for step in stage.report.steps] == [outcome]
    assert stage.report.notes == (f"non-finite in fp32 too: the weights were loaded anew, {helped}",)
    assert len(stage.renewed) == 1


@pytest.mark.parametrize("weight", [torch.nan, 0.0])
def test_it_is_tried_once(weight: float) -> None:
    stage = Stage(weight)  # 0: they could not be loaded
    with pytest.raises(GuardStopped, match="non-finite in fp32 too"):
        stage.guard(torch.ones(1, 4))
    assert len(stage.renewed) == 1 and not stage.report.steps and not stage.report.notes


def test_where_half_is_not_tried_any_more() -> None:
    stage = Stage(scope=Scope.RUN)
    stage.layer.weight.fill_(2.0)
    stage.guard(torch.full((1, 4), 3e4))
    stage.layer.weight.fill_(torch.nan)
    assert (stage.guard(torch.ones(1, 4)) == 8).all()
    assert stage.report.notes == ("non-finite in fp32 too: the weights were loaded anew, after that fp32 was finite",)


@pytest.mark.parametrize("policy", [OnFailure.STOP, OnFailure.OFF])
def test_not_where_no_rerun_is_wanted(policy: OnFailure) -> None:
    stage = Stage(on_failure=policy)
    if policy is OnFailure.STOP:
        with pytest.raises(GuardStopped, match="set to stop"):
            stage.guard(torch.ones(1, 4))
    else:
        stage.guard(torch.ones(1, 4))
    assert not stage.renewed


def test_not_for_a_broken_input() -> None:
    stage = Stage()
    with pytest.raises(GuardStopped, match="its input 'argument 1' holds 1 non-finite"):
        stage.guard(torch.tensor([[torch.nan, 1.0, 1.0, 1.0]]))
    assert not stage.renewed
