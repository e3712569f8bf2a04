"""The step guard: what counts as a failure, how it reacts, and what it leaves unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.guard import GuardStopped, OnFailure, Scope, StageGuard
from comfyui_onediff_guard.precision.overflow_detection import ClipDetector
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.precision.shallow_copy import IdentityMemo, with_forward
from guards import guarded, in_fp32, outcomes, report_of
from torch import nn

INF, NAN = float("inf"), float("nan")


class Denoiser(nn.Module):
    """Squares its input: overflows fp16 from |x| = 256 on, stays inside bf16 and fp32."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)
        seen: list[torch.dtype] = []
        self.see, self.read = seen.append, lambda: seen  # a list on the module would be restored with its state

    @property
    def seen(self):
        return self.read()

    def forward(self, hidden_states, timestep=None, table=None):
        self.see(hidden_states.dtype)
        squared = hidden_states * hidden_states
        return (self.out(squared / 1e4) + 0 * self.inner(hidden_states),)


def build(dtype: str = "fp16", **more: Any) -> tuple[Denoiser, StageGuard]:
    torch.manual_seed(0)
    module = Denoiser().to(DTYPES[dtype]).requires_grad_(False)
    return module, guarded(module, dtype, **{"inputs": ("hidden_states",), **more})


def latents(scale: float = 1.0) -> torch.Tensor:
    return torch.full((2, 3, 4), float(scale))


def test_healthy_call_stays_in_half_and_is_bit_equal():
    module, guard = build()
    x = latents(3).half()
    expected = module(x)[0]
    found = guard(hidden_states=x, timestep=torch.tensor([500, 500]))[0]
    assert found.dtype == torch.float16 and torch.equal(found, expected)
    (step,) = guard.report.steps
    assert (step.dtype, step.outcome, step.timestep, step.step) == ("fp16", "finite", 500.0, 0)
    assert step.largest == expected.abs().max()


@pytest.mark.parametrize(("scale", "hidden"), [(2000, False), (1e5, False), (1e5, True)])
def test_failing_call_is_recomputed_bit_equal_to_fp32(scale, hidden):
    """The call fails by its result, or by an input that fp16 cannot hold even if the output is finite."""
    module, guard = build()
    if hidden:
        guard._attempt = lambda hidden_states: (torch.zeros_like(hidden_states),)
    found = guard(hidden_states=latents(scale))[0]
    assert torch.equal(found, in_fp32(module, latents(scale)))
    (step,) = guard.report.steps
    assert (step.outcome, step.dtype, guard.report.reruns) == ("rerun", "fp32", 1)
    assert step.rerun is not None and step.rerun.module == ""
    assert ("outside of all layers" in step.note) == (scale == 2000)


def test_stage_without_learner_names_module_once_then_stays_in_fp32():
    module, guard = build(scope=Scope.LEARNED, give_up_after=2)
    module.out.weight.mul_(1000)
    for _ in range(3):
        guard(hidden_states=latents(2000).half())
    first, second, third = guard.report.steps
    assert first.rerun and second.rerun and first.rerun.peak and first.rerun.peak > 65504
    assert (first.rerun.module, first.rerun.action, second.rerun.module) == ("out", "", "")
    assert "'out' reaches" in first.note and second.note == "NaN or infinite in fp16"
    assert (third.outcome, third.dtype) == ("finite", "fp32") and module.seen.count(torch.float16) == 2


class Chunked(nn.Module):
    """Writes |x| into a buffer, by a square that overflows half precision and is made finite."""

    def forward(self, x, buffer):
        return buffer.copy_((x * x).nan_to_num(posinf=0.0).sqrt())


def test_buffer_written_by_rerun_survives_the_diagnosis():
    clips, module, buffer = ClipDetector("fp16"), Chunked(), torch.empty(3)
    guard = guarded(
        clips.wrap(module),
        rerun=module,
        owner=module,
        peak_inside=clips.take,
        report=report_of(component=Component.VAE_DECODE),
    )
    made = guard(torch.full((3,), 1000.0).half(), buffer=buffer)
    assert made is buffer and torch.equal(buffer, torch.full((3,), 1000.0))


def test_constant_input_is_cast_once_and_again_after_a_failure():
    module, guard = build(inputs=("hidden_states", "table"), constant=("table",))
    given, seen = torch.full((2,), 3.0), []
    module.register_forward_pre_hook(lambda _module, _args, kwargs: seen.append(kwargs["table"]), with_kwargs=True)
    for scale in (1, 2, 3000, 1):  # the third does not fit
        guard(hidden_states=latents(scale), table=given)
    first, second, *_, anew = [table for table in seen if table.dtype == torch.float16]
    assert first is second and anew is not first and torch.equal(anew, given.half())
    for _ in range(2):
        guard(hidden_states=latents(), table=torch.full((2,), 1e5))
    assert outcomes(guard) == ["finite", "finite", "rerun", "finite", "rerun", "rerun"]
    assert "input overflow" in guard.report.steps[-1].note, "checked until it fits"


def test_only_named_inputs_are_cast():
    _, guard = build()
    table, seen = torch.zeros(3), []
    guard._attempt = lambda **given: seen.append(given) or given["hidden_states"]
    guard(hidden_states=latents(), timestep=torch.tensor([0.25]), table=table)
    assert seen[0]["hidden_states"].dtype == torch.float16
    assert seen[0]["table"] is table and seen[0]["timestep"].dtype == torch.float32


@pytest.mark.parametrize("position", [(0, 0, 0), (1, 2, 3)])
@pytest.mark.parametrize(
    ("dtype", "bad"), [*(("fp16", bad) for bad in (NAN, INF, -INF, 65504.0)), ("bf16", 65504.0), ("bf16", INF)]
)
def test_single_bad_element_is_detected(dtype, bad, position):
    """Saturation counts as a failure in fp16 only."""
    _, guard = build(dtype)

    def attempt(hidden_states):
        output = torch.zeros_like(hidden_states)
        output[position] = bad
        return output

    guard._attempt = attempt
    made = guard(hidden_states=latents())[0]
    healthy = (dtype, bad) == ("bf16", 65504.0)
    assert outcomes(guard) == ["finite" if healthy else "rerun"] and made.isfinite().all()


def first_nan(count: int) -> torch.Tensor:
    x = latents()
    x[0, 0, :count] = NAN
    return x


@pytest.mark.parametrize(
    ("dtype", "policy", "weight", "x", "said", "calls"),
    [
        ("fp16", {"on_failure": OnFailure.STOP}, 0, latents(2000),
         r"denoiser, call 1: .*fp16 is NaN or infinite.*rerun", 1),
        ("fp16", {"on_failure": OnFailure.STOP}, 0, latents(1e5),
         "denoiser, call 1: its input overflows fp16, and the guard is set to 'stop'", 1),
        ("fp16", {}, 0, first_nan(2), "input 'hidden_states' holds 2 NaN or infinite values", 1),  # without a rerun
        ("fp16", {}, INF, latents(),
         r"in fp32 too.*weight 'out.weight' holds 1 NaN or infinite values \(of 16\).*is damaged", None),
        ("bf16", {}, 0, latents(1e25), "NaN or infinite in fp32 too, first in 'Denoiser'.*Remove nodes", None),
        ("fp32", {}, 0, latents(1e30), "NaN or infinite in fp32 too", None),
    ],
)  # fmt: skip
def test_stop_message_names_the_cause_and_hooks_are_removed(dtype, policy, weight, x, said, calls):
    module, guard = build(dtype, **policy)
    module.out.weight[1, 2] += weight
    with pytest.raises(GuardStopped, match=said):
        guard(hidden_states=x)
    assert calls in (None, len(module.seen))
    assert not any(child._forward_hooks for child in module.modules())


def test_later_fp32_failure_is_diagnosed_after_half_is_given_up():
    module, guard = build(scope=Scope.RUN)
    guard(hidden_states=latents(2000).half())
    module.out.weight[1, 2] = INF
    with pytest.raises(GuardStopped, match=r"weight 'out.weight' holds 1 NaN or infinite"):
        guard(hidden_states=latents())
    with pytest.raises(
        GuardStopped, match="its input 'hidden_states' holds 1 NaN or infinite values, made by the stage before it"
    ):
        guard(hidden_states=first_nan(1))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_nan_input_after_finite_call_mentions_the_call_before(dtype):
    _, guard = build(dtype)
    guard(hidden_states=latents())
    with pytest.raises(
        GuardStopped,
        match="'hidden_states' holds 1 NaN or infinite values, made by the scheduler or sampler: the previous call",
    ):
        guard(hidden_states=first_nan(1))


@pytest.mark.parametrize(
    ("on_failure", "always", "text", "said"),
    [
        ("rerun", False, "index -1", "IndexError: index -1"),
        ("rerun", False, "", "IndexError"),
        *((on_failure, on_failure == "rerun", "index -1", "") for on_failure in ("rerun", "stop", "off")),
    ],
)
def test_call_that_raises_only_in_half_is_recomputed_in_fp32(on_failure, always, text, said):
    module, guard = build(on_failure=OnFailure(on_failure))
    calls, x = [], latents(2000).half()

    def refuse(_module, _given, made):
        calls.append(made[0].dtype)
        if always or not made[0].isfinite().all():
            raise IndexError(text)

    module.register_forward_hook(refuse)
    if always or on_failure != "rerun":
        with pytest.raises(IndexError, match="index -1"):
            guard(hidden_states=x)
        assert len(calls) == 1 + always
        return
    assert torch.equal(guard(hidden_states=x)[0], in_fp32(module, x))
    assert guard.report.finding().startswith(f"Step 1: in fp16 it raised {said}. Recomp")
    assert outcomes(guard) == ["rerun"]


def test_shallow_copy_leaves_the_module_unchanged():
    module, guard = build("fp32")
    shell, calls = with_forward(module, guard), []
    module.register_forward_hook(lambda *_: calls.append("hook"))
    shell(hidden_states=latents(2000))
    assert outcomes(guard) == ["finite"], "fp32 has the range"
    assert calls == ["hook"], "the module's own hooks run once, not twice"
    assert "forward" not in vars(module) and shell.out.weight is module.out.weight


# --- weights that can be reloaded after a call fails in fp32 too ------------------------------------------------------


class Stale:
    """A linear layer with NaN weights until `renew` reloads them."""

    def __init__(self, weight: float = 2.0, dtype: str = "fp16", **policy: Any):
        self.layer = nn.Linear(4, 4, bias=False).to(DTYPES[dtype]).requires_grad_(False)
        self.layer.weight.fill_(NAN)
        self.weight, self.renewed = weight, 0
        self.guard: Any = guarded(self.layer, dtype, renew=self.renew, **policy)

    def renew(self, given: torch.Tensor) -> bool:
        self.renewed += 1
        self.layer.weight.fill_(self.weight)
        return self.weight != 0


@pytest.mark.parametrize(
    ("dtype", "given", "outcome", "helped"),
    [
        ("fp16", 3.0, "finite", "after that fp16 was finite"),
        ("fp16", 3e4, "rerun", "and the step recomputed in fp32"),
        ("fp32", 3e4, "finite", "after that fp32 was finite"),
    ],
)
def test_report_says_weights_were_reloaded_and_what_helped(dtype, given, outcome, helped):
    stage = Stale(dtype=dtype)
    assert (stage.guard(torch.full((1, 4), given)) == 8 * given).all()
    assert outcomes(stage.guard) == [outcome] and stage.renewed == 1
    assert stage.guard.report.notes == (f"NaN or infinite in fp32 too: the weights were reloaded, {helped}",)


def test_weights_are_reloaded_after_half_is_given_up():
    stage = Stale(scope=Scope.RUN)
    stage.layer.weight.fill_(2.0)
    stage.guard(torch.full((1, 4), 3e4))
    stage.layer.weight.fill_(NAN)
    assert (stage.guard(torch.ones(1, 4)) == 8).all()
    assert stage.guard.report.notes[0].endswith("after that fp32 was finite")


@pytest.mark.parametrize(
    ("weight", "policy", "x", "said", "renewed"),
    [
        (NAN, OnFailure.RERUN, 1.0, "NaN or infinite in fp32 too", 1),
        (0.0, OnFailure.RERUN, 1.0, "NaN or infinite in fp32 too", 1),  # reloading failed
        (2.0, OnFailure.STOP, 1.0, "set to 'stop'", 0),
        (2.0, OnFailure.OFF, 1.0, "", 0),
        (2.0, OnFailure.RERUN, NAN, "its input 'argument 1' holds 1 NaN or infinite", 0),
    ],
)
def test_weights_are_reloaded_once_and_only_if_it_can_help(weight, policy, x, said, renewed):
    stage, given = Stale(weight, on_failure=policy), torch.ones(1, 4)
    given[0, 0] = x
    if said:
        with pytest.raises(GuardStopped, match=said):
            stage.guard(given)
        assert outcomes(stage.guard) == ["non-finite"] and not stage.guard.report.notes
    else:
        stage.guard(given)
    assert stage.renewed == renewed


# --- -inf or a dtype's lowest value in an output, as in masks: correct if fp32 has it at the same places --------------

FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "-inf": lambda _: -INF,
    "the dtype's least": lambda x: torch.finfo(x.dtype).min,
    "float32's least": lambda _: torch.finfo(torch.float32).min,
    "fp16's least": lambda _: -65504.0,
}


class Masks(nn.Module):
    """x [2, 4] → (output of a layer, additive mask of positions where x is 0)."""

    def __init__(self, fill: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.fill = fill
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.full((), self.fill(x), dtype=torch.float64).to(x.dtype)
        return self.layer(x), torch.where(x == 0, value, torch.zeros_like(x))


def masking(fill: Any, dtype: str = "fp16", **policy: Any) -> tuple[Masks, StageGuard]:
    torch.manual_seed(0)
    module = Masks(fill).to(DTYPES[dtype]).requires_grad_(False)
    return module, guarded(module, dtype, **policy)


def masked(*zeros: int, scale: float = 1.0, dtype: str = "fp16") -> torch.Tensor:
    x = scale * torch.rand((2, 4), generator=torch.Generator().manual_seed(1)) + 0.1
    x[:, list(zeros)] = 0
    return x.to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("on_failure", [OnFailure.RERUN, OnFailure.STOP])
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@torch.no_grad()
def test_masks_are_recomputed_at_most_twice_and_stop_no_run(fill, scope, on_failure, dtype):
    module, run = masking(fill, dtype, scope=scope, on_failure=on_failure)
    for _ in range(2):
        for zeros in ((1, 2), (3,)):
            made = run(masked(*zeros, dtype=dtype))
            assert torch.equal(made[1] < -6e4, masked(*zeros) == 0)
    assert outcomes(run)[2:] == ["finite", "finite"] and run.report.failed == 0 and run.report.reruns <= 2
    assert run.report.steps[-1].dtype == dtype
    assert not any(step.rerun and step.rerun.action for step in run.report.steps)
    expected = module(masked(3, dtype=dtype))
    assert all(map(torch.equal, run(masked(3, dtype=dtype)), expected))


@torch.no_grad()
def test_overflow_beside_a_mask_fails_every_time():
    module, run = masking(FILLS["-inf"], scope=Scope.STEP)
    run(masked(1))
    module.layer.weight.mul_(1e4)
    right = copy.deepcopy(module).float()
    for _ in range(2):
        x = masked(1, scale=1e3)
        assert all(map(torch.equal, run(x), right(x.float())))
    assert outcomes(run) == ["rerun", "rerun", "rerun"]
    hot, stops = masking(FILLS["-inf"], on_failure=OnFailure.STOP)
    hot.layer.weight.mul_(1e4)
    with pytest.raises(GuardStopped, match="set to 'stop'"):
        stops(masked(1, scale=1e3))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@torch.no_grad()
def test_broken_weight_is_not_taken_for_a_mask(value, dtype):
    module, run = masking(FILLS["-inf"], dtype)
    module.layer.weight[1] = value
    with pytest.raises(GuardStopped, match=r"weight 'layer\.weight' holds"):
        run(masked(1, dtype=dtype))


def test_identity_memo_knows_same_tensor_not_an_equal_one() -> None:
    once, made = IdentityMemo(kept=2), []
    first, second, third = (torch.ones(2) for _ in range(3))
    for given in (first, first, second, first, third, second, first):
        assert once.of(given, lambda given: made.append(id(given)) or given + 1).eq(2).all()
    assert made == [id(first), id(second), id(third), id(first)], "two are kept, the oldest is dropped"
    assert once.of(first, torch.neg) is once.of(first, torch.neg)
