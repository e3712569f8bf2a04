"""An output that has -inf or a dtype's end in it, as masks do, is right where fp32 has the same at the same places."""

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
from torch import nn

CPU = ARCHITECTURES["cpu"]
INF = float("inf")
FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "-inf": lambda _: -INF,
    "the dtype's least": lambda x: torch.finfo(x.dtype).min,
    "float32's least": lambda _: torch.finfo(torch.float32).min,
    "fp16's least": lambda _: -65504.0,
}


class Masks(nn.Module):
    """x [2, 4] → (its layer's result, an additive mask of positions that are 0)."""

    def __init__(self, fill: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.fill = fill
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.zeros_like(x)
        value = torch.full((), self.fill(x), dtype=torch.float64).to(x.dtype)
        return self.layer(x), torch.where(x == 0, value, mask)


def guarded(fill: Any, dtype: str = "fp16", **policy: Any) -> tuple[Masks, StageGuard]:
    torch.manual_seed(0)
    module = Masks(fill).to(DTYPES[dtype]).requires_grad_(False)
    plan = choose(CPU, VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision(dtype))
    report = RunReport("CogVideoX-5B", str(CPU), plan)
    return module, StageGuard("denoiser", module, dtype=dtype, policy=GuardPolicy(**policy), report=report)


def latents(*zeros: int, scale: float = 1.0, dtype: str = "fp16") -> torch.Tensor:
    x = scale * torch.rand((2, 4), generator=torch.Generator().manual_seed(1)) + 0.1
    x[:, list(zeros)] = 0
    return x.to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("on_failure", [OnFailure.RERUN, OnFailure.STOP])
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@torch.no_grad()
def test_a_mask_is_computed_again_once_and_ends_no_run(
    fill: Any, scope: Scope, on_failure: OnFailure, dtype: str
) -> None:
    module, run = guarded(fill, dtype, scope=scope, on_failure=on_failure)
    for _ in range(2):
        for zeros in ((1, 2), (3,)):
            made = run(latents(*zeros, dtype=dtype))
            assert torch.equal(made[1] < -6e4, latents(*zeros) == 0)
    outcomes = [step.outcome for step in run.report.steps]
    assert outcomes[2:] == ["finite", "finite"] and run.report.failed == 0 and run.report.reruns <= 2
    assert run.report.steps[-1].dtype == dtype and not any(
        step.rerun and step.rerun.action for step in run.report.steps
    )
    expected = module(latents(3, dtype=dtype))
    assert all(map(torch.equal, run(latents(3, dtype=dtype)), expected))


@torch.no_grad()
def test_what_overflows_beside_a_mask_is_a_failure_each_time() -> None:
    module, run = guarded(FILLS["-inf"], scope=Scope.STEP)
    run(latents(1))
    module.layer.weight.mul_(1e4)
    right = Masks(FILLS["-inf"])
    right.load_state_dict({name: value.float() for name, value in module.state_dict().items()})
    for _ in range(2):
        x = latents(1, scale=1e3)
        assert all(map(torch.equal, run(x), right(x.float())))
    assert [step.outcome for step in run.report.steps] == ["rerun", "rerun", "rerun"]
    hot, stops = guarded(FILLS["-inf"], on_failure=OnFailure.STOP)
    hot.layer.weight.mul_(1e4)
    with pytest.raises(GuardStopped, match="set to stop"):
        stops(latents(1, scale=1e3))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
@torch.no_grad()
def test_a_broken_weight_is_no_mask(value: float, dtype: str) -> None:
    module, run = guarded(FILLS["-inf"], dtype)
    module.layer.weight[1] = value
    with pytest.raises(GuardStopped, match=r"weight 'layer\.weight' holds"):
        run(latents(1, dtype=dtype))
