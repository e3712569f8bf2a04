"""Precision overrides that a run learns from failing calls."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import guards
import pytest
import torch
from blocky import Faults, build, guarded, latents, overflow_inside, overflow_stream
from comfyui_onediff_guard.precision.after_failure import (
    FallbackAdapter,
    HalfPrecisionForward,
    build_half_precision_forward,
    is_relevant,
)
from comfyui_onediff_guard.precision.overflow_detection import ClipDetector
from comfyui_onediff_guard.precision.overrides import NOTHING, OverflowDiagnosis, PrecisionOverrides
from comfyui_onediff_guard.precision.report import Rerun, StepRecord
from guards import in_fp32
from overflows import fails_in_half
from torch import nn

IN_FP32 = PrecisionOverrides(whole_run_fp32=True)
REST, ALL_LAYERS_SCALED = "the rest of the run in fp32", "overflow protection from here on"


def nan(made):
    made.view(-1)[3] = math.nan


def fail_always(run, attempt):
    """Use `attempt` for all half-precision calls, whatever overrides are learned."""
    run.learner.attempt = HalfPrecisionForward(attempt, attempt)
    run.learner.build = lambda _learned: run.learner.attempt
    run.guard._attempt = attempt


class LargeInFp32(nn.Module):
    """Runs in fp32 in half-precision calls too, like T5's `wo`: exceeds fp16 and is scaled back."""

    def __init__(self):
        super().__init__()
        self.wo = nn.Linear(8, 8)
        self.wo.weight.data.mul_(1e6)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.wo(x.float()) * 1.0).div(1e6).to(x.dtype)


def fail_even_scaled(module, block=2):
    module.blocks[block].inner.register_forward_hook(fails_in_half)


def hot_embedding(module, gain=1.5e5):
    module.embed.weight.mul_(gain)


def overflow_in_embedding(module):
    first, last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8).requires_grad_(False)
    first.weight.mul_(2.0**17)
    last.weight.mul_(2.0**-14)
    module.embed = nn.Sequential(first, nn.SiLU(), last).half()


def wo_in_the_first_block(module):
    module.blocks[0].norm = nn.Sequential(module.blocks[0].norm, LargeInFp32()).eval().requires_grad_(False)


def sample(run, calls=5):
    """Make `calls` calls, each near fp32."""
    for call in range(calls):
        x = latents(call)
        assert (run(x).float() - in_fp32(run.module, x)).abs().max() < 0.1
    return run


@dataclass
class Case:
    """A module, the options of its guard, and the expected outcome of five calls."""

    changes: list[Any]  # (function that changes the module, *arguments)
    learned: PrecisionOverrides = NOTHING
    actions: tuple[str, ...] = ()  # of the reruns, in order
    module: str = ""  # named as the failed one in the first rerun
    note: str = ""  # in the first step
    dtype: str = "fp16"
    blocks: int = 4
    given: dict[str, Any] = field(default_factory=dict)  # arguments of `guarded`


def hidden(*names):
    """Faults that fp32 does not reproduce."""
    return {"faults": Faults(dict.fromkeys(names, nan), range(100))}


INNER, STREAM, EVEN_SCALED = (overflow_inside, 2), (overflow_stream, 1), (fail_even_scaled,)
SCALED, PROTECTED = PrecisionOverrides(all_layers_scaled=True), {"all_layers_scaled": True}
CASES = {
    "an inner overflow": Case([INNER], SCALED, (ALL_LAYERS_SCALED,), "blocks.2.inner"),
    "beside a layer kept in fp32": Case(
        [(wo_in_the_first_block,), INNER], SCALED, (ALL_LAYERS_SCALED,), "blocks.2.inner"
    ),
    "a stream": Case([STREAM], SCALED, (ALL_LAYERS_SCALED,), blocks=28, note="'blocks.1' outputs"),
    "a stream from its start on": Case([(hot_embedding,)], SCALED, (ALL_LAYERS_SCALED,), "embed"),
    "a stream and an inner overflow": Case([STREAM, INNER], SCALED, (ALL_LAYERS_SCALED,)),
    "outside of the blocks": Case([(overflow_in_embedding,)], SCALED, (ALL_LAYERS_SCALED,), "embed.0"),
    "not reproduced in fp32": Case([], SCALED, (ALL_LAYERS_SCALED,), "blocks.2.inner", given=hidden("blocks.2.inner")),
    "fails with all layers scaled too": Case([EVEN_SCALED, STREAM], IN_FP32, (ALL_LAYERS_SCALED, REST)),
    "protected, all overflows": Case([STREAM, INNER, (overflow_in_embedding,)], given=PROTECTED),
    "protected, fails with all layers scaled": Case([EVEN_SCALED], IN_FP32, (REST,), "blocks.2.inner", given=PROTECTED),
    "learned before": Case([STREAM, INNER], SCALED, given={"learned": SCALED}),
    "fp32 from an earlier run": Case([], IN_FP32, given={"learned": IN_FP32}),
    "in bf16": Case([EVEN_SCALED], IN_FP32, (ALL_LAYERS_SCALED, REST), dtype="bf16"),
    "not reproduced in fp32, in bf16": Case(
        [], SCALED, (ALL_LAYERS_SCALED,), "blocks.2.inner", dtype="bf16", given=hidden("blocks.2.inner")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_overrides_are_learned_from_failing_calls(case):
    module = build(case.blocks, case.dtype)
    for change, *given in case.changes:
        change(module, *given)
    run = guarded(module, case.dtype, **copy.deepcopy(case.given))
    sample(run)
    failed = len(case.actions)
    assert run.outcomes == ["rerun"] * failed + ["finite"] * (5 - failed)
    after = "fp32" if run.learned.whole_run_fp32 else case.dtype
    assert run.dtypes == ["fp32"] * failed + [after] * (5 - failed)
    assert run.learned == case.learned
    assert tuple(run.rerun(step).action for step in range(failed)) == case.actions
    assert all(run.rerun(step).module.startswith(case.module) for step in range(min(failed, 1)))
    assert case.note in run.report.steps[0].note and ("faults" not in case.given or run.rerun(0).peak < 65504)
    if not run.learned.whole_run_fp32:
        is_scaled = case.learned.all_layers_scaled or case.given == PROTECTED
        assert run.learner.attempt.all_layers_scaled == is_scaled
        assert not is_scaled or (run(latents() * 1e6).isfinite().all() and run.outcomes[-1] == "finite"), (
            "its input need not fit"
        )
        again = sample(guarded(module, case.dtype, **copy.deepcopy(case.given) | {"learned": run.learned}))
        assert again.report.reruns == 0
    run.learner.stay()
    assert run.learner.learned == replace(case.learned, whole_run_fp32=True), "helpful overrides are kept"


def test_fault_that_does_not_repeat_adds_no_override():
    run = guarded(build(), faults=Faults({"blocks.3": nan}, [1]))
    located = run.learner.locate
    run.learner.locate = lambda *a, **k: (setattr(run.faults, "calls", ()), located(*a, **k))[1]
    sample(run)
    assert run.outcomes == ["finite", "rerun", "finite", "finite", "finite"]
    assert run.learned == NOTHING and "the repeated call did not fail" in run.report.steps[1].note


class ClippedBeside(nn.Module):
    """A module with a patch of another pack, which clips what no module puts out. factors: of its calls."""

    def __init__(self, factors):
        super().__init__()
        self.layer, self.factors = nn.Linear(8, 8).half().requires_grad_(False), factors

    def forward(self, x):
        beside = x * next(self.factors)
        return self.layer(beside.nan_to_num() / beside.abs().max().nan_to_num())


@pytest.mark.parametrize(
    ("factors", "learned", "found"),
    [
        (repeat(1e6), SCALED, "it overflows outside of all layers"),
        (chain([1e6], repeat(1.0)), NOTHING, "the repeated call did not fail"),
    ],
)
def test_repeated_clipping_outside_of_modules_turns_protection_on(factors, learned, found):
    module, clips = ClippedBeside(factors), ClipDetector("fp16")

    def make(known):
        made = build_half_precision_forward(module, known, "fp16")
        return made if made.all_layers_scaled else replace(made, run=clips.wrap(module), eager=clips.wrap(module))

    learner = FallbackAdapter(module, "fp16", make)
    seen = {"peak_inside": lambda: None if learner.attempt.all_layers_scaled else clips.take()}
    guard = guards.guarded(learner, rerun=module, **seen)
    for call in range(4):
        guard(latents(call).half())
    assert guards.outcomes(guard) == ["rerun", "finite", "finite", "finite"]
    assert guard.learned == learned and found in guard.report.steps[0].note


class Broken(nn.Module):
    def __init__(self, each_time):
        super().__init__()
        calls: list[int] = []
        self.calls, self.each_time = lambda: calls, each_time

    def forward(self, x):
        self.calls().append(1)
        return (torch.full_like(x, math.nan if self.each_time or len(self.calls()) % 2 else 0.0),)


@pytest.mark.parametrize("each_time", [False, True], ids=["not reproduced", "outside of all modules"])
def test_repeated_failures_switch_to_fp32_without_half_attempts(each_time):
    run, broken = guarded(build(), give_up_after=3), Broken(each_time)
    fail_always(run, broken)
    sample(run, 6)
    failed = 2 if each_time else 3
    assert run.outcomes == ["rerun"] * failed + ["finite"] * (6 - failed) and run.dtypes == ["fp32"] * 6
    assert len(broken.calls()) == 2 * failed, "each repeated once to locate the failure"
    assert run.learned == IN_FP32 and run.rerun(failed - 1).action == REST and run.built[1:] == []
    assert run.report.steps[failed].note == "half precision is no longer used"


@pytest.mark.parametrize("too_many", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_overrides_that_did_not_help_are_dropped(dtype, too_many):
    helps = PrecisionOverrides(unquantised=("blocks.0.inner",))
    run = guarded(build(dtype=dtype), dtype, learned=helps)
    run(latents())
    run.learner.learn(OverflowDiagnosis("", "blocks.1"))
    assert run.learner.learned == replace(helps, all_layers_scaled=True)
    ended = run.learner.stay() if too_many else run.learner.learn(OverflowDiagnosis("", "blocks.1"))
    assert ended == REST
    assert run.learner.learned == replace(helps, whole_run_fp32=True), "a call was finite with it"


def test_inputs_beyond_fp16_switch_to_fp32_without_overrides():
    module = build()
    run = guarded(module)
    hot_embedding(module, 1e-3)
    for call in range(4):
        run(latents(call) * 1e5)
    assert run.learned == IN_FP32 and len(run.built) == 1
    assert run.outcomes == ["rerun"] * 3 + ["finite"], "but it counts as a failure"
    assert run.report.steps[0].note == "input overflow in fp16"


def test_report_has_rerun_memory_and_learned_overrides():
    module = build()
    overflow_inside(module, 2)
    run = sample(guarded(module))
    run.report.learned = run.learned
    assert run.rerun(0).extra_bytes == 4 * (8 * 8 + 8), "the largest layer's weights and bias in float32"
    assert run.report.as_dict()["learned"]["all_layers_scaled"]
    assert max(map(len, run.report.text().splitlines())) < 240


def test_nonfinite_values_are_strings_in_json():
    run = guarded(build())
    rerun = Rerun("a", math.inf, "", 1.0, None)
    run.report.add(StepRecord("denoiser", 0, math.nan, "fp32", "rerun", 1.0, -math.inf, rerun=rerun))
    (step,) = run.report.as_dict()["steps"]
    assert (step["rerun"]["peak"], step["timestep"], step["largest"]) == ("inf", "nan", "-inf")
    json.dumps(run.report.as_dict(), allow_nan=False)


class CastsAtCall(nn.Linear):
    """Like ComfyUI's layers whose weights have another dtype than the computation."""

    comfy_cast_weights = True


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(2, 2).half(), True),
        (nn.Linear(2, 2), False),
        (CastsAtCall(2, 2), True),
        (nn.SiLU(), True),
        (nn.Dropout(), False),
    ],
)
def test_only_layers_that_compute_in_half_are_relevant(layer: nn.Module, expected: bool) -> None:
    assert is_relevant(layer) is expected
