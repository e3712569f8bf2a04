"""The step guard: what counts as failing, what it does about it, and what it leaves alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.accumulation import Switch
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.guard import (
    GuardPolicy,
    GuardStopped,
    OnFailure,
    Scope,
    StageGuard,
)
from comfyui_onediff_guard.precision.overflow import Clips
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.precision.shallow_copy import with_forward
from torch import nn

CPU = ARCHITECTURES["cpu"]


class Denoiser(nn.Module):
    """Squares what it is given: beyond fp16 from |x| = 256 on, well inside bf16 and fp32."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)
        seen: list[torch.dtype] = []
        self.see, self.read = seen.append, lambda: seen  # a list on the module would be put back with its state

    @property
    def seen(self):
        return self.read()

    def forward(self, hidden_states, timestep=None, table=None):
        self.see(hidden_states.dtype)
        squared = hidden_states * hidden_states
        return (self.out(squared / 1e4) + 0 * self.inner(hidden_states),)


def build(dtype="fp16", **policy):
    torch.manual_seed(0)
    module = Denoiser().to(DTYPES[dtype]).requires_grad_(False)
    plan = choose(CPU, VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision(dtype))
    report = RunReport("CogVideoX-5B", str(CPU), plan)
    guard = StageGuard(
        "denoiser", module, dtype=dtype, policy=GuardPolicy(**policy), report=report, inputs=("hidden_states",)
    )
    return module, with_forward(module, guard), report


def latents(scale=1.0):
    return torch.full((2, 3, 4), float(scale))


def reruns(report) -> list[Any]:
    return [step.rerun for step in report.steps]


def test_a_healthy_call_is_bit_equal_and_stays_in_half():
    module, shell, report = build()
    x = latents(3).half()
    expected = module(x)[0]
    found = shell(hidden_states=x, timestep=torch.tensor([500, 500]))[0]
    assert found.dtype == torch.float16
    assert torch.equal(found, expected)
    (step,) = report.steps
    assert (step.dtype, step.outcome, step.timestep, step.step) == ("fp16", "finite", 500.0, 0)
    assert step.largest == expected.abs().max()


def test_a_failing_call_is_rerun_and_equals_fp32():
    module, shell, report = build()
    x = latents(2000).half()
    assert not torch.isfinite(module(x)[0]).all()
    found = shell(hidden_states=x)[0]
    assert torch.equal(found, copy.deepcopy(module).float()(x.float())[0])
    assert [step.outcome for step in report.steps] == ["rerun"]
    assert report.steps[0].dtype == "fp32"
    assert report.reruns == 1


def test_a_stage_that_cannot_learn_names_where_it_failed_once():
    module, shell, report = build(scope=Scope.LEARNED, stay_after=9)
    module.out.weight.mul_(1000)
    for _ in range(2):
        shell(hidden_states=latents(2000).half())
    first, second = reruns(report)
    assert (first.module, first.action, second.module) == ("out", "", "")
    assert first.peak > 65504 and "'out' reaches" in report.steps[0].note
    assert report.steps[1].note == "non-finite in fp16"


class Chunked(nn.Module):
    """|x| into a buffer, through a square that half precision cannot hold, which is hidden."""

    def forward(self, x, buffer):
        return buffer.copy_((x * x).nan_to_num(posinf=0.0).sqrt())


def test_what_a_rerun_wrote_into_a_buffer_stays_when_its_reason_is_looked_for():
    plan = choose(CPU, VARIANTS["CogVideoX-5B"], Component.VAE_DECODE, Precision("fp16"))
    clips, module = Clips("fp16"), Chunked()
    guard = StageGuard(
        "vae_decode",
        clips.watched(module),
        rerun=module,
        owner=module,
        dtype="fp16",
        policy=GuardPolicy(),
        report=RunReport("", str(CPU), plan),
        peak_inside=clips.take,
    )
    buffer = torch.empty(3)
    made = guard(torch.full((3,), 1000.0).half(), buffer=buffer)
    assert made is buffer and torch.equal(buffer, torch.full((3,), 1000.0))


def test_what_overflows_in_a_stages_own_forward_is_said_to_be_outside_of_its_layers():
    _, shell, report = build()
    shell(hidden_states=latents(2000).half())
    assert reruns(report)[0].module == "" and "it overflows outside of all layers" in report.steps[0].note


def test_a_stage_that_cannot_learn_stays_in_fp32_where_it_keeps_failing():
    module, shell, report = build(scope=Scope.LEARNED, stay_after=2)
    for _ in range(3):
        shell(hidden_states=latents(2000).half())
    assert [step.outcome for step in report.steps] == ["rerun", "rerun", "finite"]
    assert report.steps[2].dtype == "fp32" and len([d for d in module.seen if d == torch.float16]) == 3


def test_fp32_that_breaks_later_is_diagnosed_where_half_is_not_tried():
    module, shell, _ = build(scope=Scope.RUN)
    shell(hidden_states=latents(2000).half())
    module.out.weight[1, 2] = float("inf")
    with pytest.raises(GuardStopped, match=r"weight 'out.weight' holds 1 non-finite"):
        shell(hidden_states=latents())
    x = latents()
    x[0, 0, 0] = float("nan")
    with pytest.raises(GuardStopped, match="its input 'hidden_states' holds 1 non-finite values already"):
        shell(hidden_states=x)


def test_half_steps_go_on_after_a_rerun_handed_on_float32():
    module, shell, report = build()
    carried = shell(hidden_states=latents(2000).half())[0]
    assert carried.dtype == torch.float32
    shell(hidden_states=carried / carried.abs().max())
    assert [step.dtype for step in report.steps] == ["fp32", "fp16"]
    assert module.seen[-1] == torch.float16


def test_an_input_beyond_half_keeps_that_call_in_fp32():
    module, shell, report = build()
    x = latents(1e5)
    found = shell(hidden_states=x)[0]
    assert torch.equal(found, copy.deepcopy(module).float()(x)[0])
    assert report.steps[0].outcome == "rerun"


def test_an_input_beyond_half_is_noticed_even_where_the_output_is_finite():
    module, shell, report = build()
    shell.forward._attempt = lambda hidden_states: (torch.zeros_like(hidden_states),)
    x = latents(1e5)
    assert torch.equal(shell(hidden_states=x)[0], copy.deepcopy(module).float()(x)[0])
    assert report.reruns == 1


def test_a_constant_input_is_cast_once_and_anew_after_a_call_that_fails():
    module, _, report = build()
    named: Any = {"inputs": ("hidden_states", "table"), "constant": ("table",)}
    guard = StageGuard("denoiser", module, dtype="fp16", policy=GuardPolicy(), report=report, **named)
    given, seen = torch.full((2,), 3.0), []
    module.register_forward_pre_hook(lambda _module, _args, kwargs: seen.append(kwargs["table"]), with_kwargs=True)
    for scale in (1, 2, 3000, 1):  # the third does not fit
        guard(hidden_states=latents(scale), table=given)
    first, second, *_, anew = [table for table in seen if table.dtype == torch.float16]
    assert first is second and anew is not first and torch.equal(anew, given.half())
    guard(hidden_states=latents(), table=torch.full((2,), 1e5))
    assert [step.outcome for step in report.steps] == ["finite", "finite", "rerun", "finite", "rerun"]
    guard(hidden_states=latents(), table=torch.full((2,), 1e5))
    assert "its input does not fit" in report.steps[-1].note, "it is looked at until it fits"


def test_only_named_inputs_are_cast():
    _, shell, _ = build()
    table = torch.zeros(3)
    seen = []
    shell.forward._attempt = lambda **given: seen.append(given) or given["hidden_states"]
    shell(hidden_states=latents(), timestep=torch.tensor([0.25]), table=table)
    assert seen[0]["hidden_states"].dtype == torch.float16
    assert seen[0]["table"] is table
    assert seen[0]["timestep"].dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 65504.0])
@pytest.mark.parametrize("position", [(0, 0, 0), (1, 2, 3)])
def test_a_single_bad_element_is_found(bad, position):
    _, shell, report = build()
    attempts = iter([bad])

    def attempt(**given):
        output = torch.zeros_like(given["hidden_states"])
        output[position] = next(attempts)
        return output

    shell.forward._attempt = attempt
    assert torch.isfinite(shell(hidden_states=latents())[0]).all()
    assert report.reruns == 1


def test_saturation_is_a_failure_in_fp16_only():
    _, shell, report = build("bf16")
    shell.forward._attempt = lambda **given: torch.full_like(given["hidden_states"], 65504.0)
    shell(hidden_states=latents())
    assert report.steps[0].outcome == "finite"


def test_stop_ends_the_run_and_says_what_to_do():
    _, shell, _ = build(on_failure=OnFailure.STOP)
    with pytest.raises(GuardStopped, match=r"denoiser, call 1: the output in fp16 is non-finite.*'rerun'"):
        shell(hidden_states=latents(2000))


def test_off_only_watches():
    module, shell, report = build(on_failure=OnFailure.OFF)
    found = shell(hidden_states=latents(2000))[0]
    assert not torch.isfinite(found).all()
    assert module.seen == [torch.float16]
    assert report.steps[0].outcome == "non-finite"
    assert report.failed == 1
    assert "NOT FINITE" in report.summary()


def test_a_broken_input_is_not_blamed_on_the_stage():
    module, shell, _ = build()
    x = latents()
    x[0, 0, :2] = float("nan")
    with pytest.raises(GuardStopped, match=r"input 'hidden_states' holds 2 non-finite values"):
        shell(hidden_states=x)
    assert len(module.seen) == 1, "no rerun was wasted"


def test_a_broken_weight_is_named():
    module, shell, _ = build()
    module.out.weight[1, 2] = float("inf")
    with pytest.raises(GuardStopped, match=r"in fp32 too.*weight 'out.weight' holds 1 non-finite values of 16"):
        shell(hidden_states=latents())


def test_where_fp32_fails_too_the_first_module_is_named_and_its_hooks_go():
    module, shell, _ = build("bf16")
    with pytest.raises(GuardStopped, match=r"non-finite in fp32 too, first in 'Denoiser'"):
        shell(hidden_states=latents(1e25))
    assert not any(child._forward_hooks for child in module.modules())


def test_fp32_is_checked_too():
    _, shell, report = build("fp32")
    shell(hidden_states=latents(2000))
    assert report.steps[0].outcome == "finite"
    with pytest.raises(GuardStopped, match="non-finite in fp32 too"):
        shell(hidden_states=latents(1e30))


def test_the_shell_leaves_the_module_alone():
    module, shell, _ = build()
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append("hook"))
    x = latents().half()
    shell(hidden_states=x)
    assert calls == ["hook"], "the module's own hooks run once, not twice"
    assert "forward" not in vars(module)
    assert shell.out.weight is module.out.weight
    handle.remove()


def test_an_exception_passes_through_and_the_next_call_works():
    _, shell, report = build()
    attempt = shell.forward._attempt
    shell.forward._attempt = lambda **_: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        shell(hidden_states=latents())
    shell.forward._attempt = attempt
    shell(hidden_states=latents())
    assert len(report.steps) == 1


def test_the_report_adds_up():
    _, shell, report = build()
    for scale in (1, 2000, 3, 2000):
        shell(hidden_states=latents(scale), timestep=torch.tensor(scale))
    facts = report.as_dict()
    assert facts["outcomes"] == {"finite": 2, "rerun": 2}
    assert facts["reruns"] == 2
    assert facts["seconds"] == pytest.approx(sum(step["seconds"] for step in facts["steps"]))
    assert "4 steps, 2 reruns" in facts["summary"]
    assert len([line for line in report.text().splitlines() if line.startswith("denoiser ")]) == 4


def test_the_report_has_a_cell_a_step_and_tells_the_plan_first_and_the_switches_last():
    _, shell, report = build()
    for scale in (1, 2000, 3, 4, 5, 6, 2000):
        shell(hidden_states=latents(scale), timestep=torch.tensor(scale))
    report.steps[4:6] = [replace(report.steps[4], dtype="fp32"), replace(report.steps[5], outcome="saturated")]
    report.note("a note")
    report.switches = (Switch("A_SWITCH", "1", "user", "exported"),)
    assert report.as_dict()["cells"] == ["half", "rerun", "half", "half", "fp32", "failed", "rerun"]
    report.calls_per_step = 2
    assert report.cells() == ["rerun", "half", "failed", "rerun"]
    said = report.as_dict()["text"]
    places = [said.index(part) for part in (report.summary(), "wide: ", "denoiser 1 ", "note: a note", "A_SWITCH=1")]
    assert places == sorted(places)
