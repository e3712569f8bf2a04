"""What a run learns from failing calls, and what each scope does with it."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from blocky import STREAM, Faults, build, guarded, latents, overflow_inside, overflow_stream
from comfyui_onediff_guard.precision.fallback import HalfPrecisionForward
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.half_products import HalfProducts
from comfyui_onediff_guard.precision.overrides import OverflowDiagnosis, PrecisionOverrides, Stream
from comfyui_onediff_guard.precision.report import Rerun, StepRecord
from comfyui_onediff_guard.precision.wide import CannotWiden
from torch import nn
from torch.overrides import _get_current_function_mode_stack


def nan(made):
    made.view(-1)[3] = math.nan


def fail_always(run, attempt):
    """Half-precision calls are `attempt`, whatever is learned."""
    run.learner.attempt = HalfPrecisionForward(attempt, attempt)
    run.learner._build = lambda _learned: run.learner.attempt
    run.guard._attempt = attempt


class FailsWide(nn.Module):
    """A layer that comes out broken in half precision, and where it is wide: fp32 alone is right."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        made = self.layer(x)
        is_wide = any(isinstance(mode, HalfProducts) for mode in _get_current_function_mode_stack())
        return made * math.inf if is_wide or made.dtype != torch.float32 else made


def fail_even_wide(module, block):
    module.blocks[block].inner = FailsWide(module.blocks[block].inner)
    return module


def sample(run, calls=5):
    """Outputs of so many calls, each near to fp32's."""
    for call in range(calls):
        x = latents(call)
        found, expected = run(x).float(), copy.deepcopy(run.module).float()(x)[0]
        assert (found - expected).abs().max() < 0.1
    return run


def test_the_default_is_to_learn():
    assert GuardPolicy().scope is Scope.LEARNED


def test_scope_step_reruns_the_call_and_learns_nothing():
    module = build()
    overflow_inside(module, 2)
    run = sample(guarded(module, scope=Scope.STEP))
    assert run.outcomes == ["rerun"] * 5 and run.learner.learned == PrecisionOverrides() and run.learned is None
    first, *later = map(run.rerun, range(5))
    assert (first.module, first.action) == ("blocks.2.inner", "") and first.peak > 65504
    assert {rerun.module for rerun in later} == {""}, "it is looked for once"


def test_an_inner_overflow_makes_its_block_wide():
    module = build()
    overflow_inside(module, 2)
    run = sample(guarded(module))
    assert run.outcomes == ["rerun", *["finite"] * 4] and run.dtypes == ["fp32", *["fp16"] * 4]
    assert run.learned == PrecisionOverrides(wide_parts=("blocks.2",))
    assert run.rerun(0).action == "'blocks.2' wide from the next call on"


@pytest.mark.parametrize("stream", [STREAM, None])
def test_a_wide_block_that_fails_again_becomes_an_island(stream):
    run = sample(guarded(fail_even_wide(build(), 2), stream=stream))
    assert run.outcomes == ["rerun", "rerun", *["finite"] * 3] and run.dtypes == ["fp32"] * 2 + ["fp16"] * 3
    assert run.learned == PrecisionOverrides(islands=("blocks.2",))
    assert [run.rerun(step).action for step in range(2)] == [
        "'blocks.2' wide from the next call on",
        "'blocks.2' in fp32 from the next call on",
    ]
    assert run.rerun(0).module.startswith("blocks.2.inner") and run.rerun(1).module.startswith("blocks.2.inner")


def test_in_bf16_a_block_that_fails_becomes_an_island_at_once():
    run = sample(guarded(fail_even_wide(build(dtype="bf16"), 2), "bf16"))
    assert run.outcomes == ["rerun", *["finite"] * 4] and run.dtypes == ["fp32", *["bf16"] * 4]
    assert run.learned == PrecisionOverrides(islands=("blocks.2",))
    assert run.rerun(0).action == "'blocks.2' in fp32 from the next call on"


def test_a_layer_that_is_fp32_in_the_half_call_too_is_not_blamed():
    class Wide(nn.Module):
        """Like T5's `wo`: beyond fp16, and brought back."""

        def __init__(self):
            super().__init__()
            self.wo = nn.Linear(8, 8)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            return self.dropout(self.wo(x.float()) * 1.0).div(1e6).to(x.dtype)

    module, wide = build(), Wide()
    with torch.no_grad():
        wide.wo.weight.mul_(1e6)
    block: Any = module.blocks[0]
    block.norm = nn.Sequential(block.norm, wide)
    overflow_inside(module, 3)
    run = guarded(module.eval().requires_grad_(False), stream=None)
    run(latents())
    assert run.rerun(0).module == "blocks.3.inner" and run.learned.parts == ("blocks.3",)


def test_two_inner_overflows_are_learned_from_one_failure():
    module = build()
    overflow_inside(module, 0)
    overflow_inside(module, 3)
    run = sample(guarded(module))
    assert run.report.reruns == 1 and run.learned == PrecisionOverrides(wide_parts=("blocks.0", "blocks.3"))


def test_a_failing_stream_is_float32_from_then_on_and_no_island():
    module = build(28)
    overflow_stream(module, 0)
    run = sample(guarded(module))
    assert run.outcomes == ["rerun", *["finite"] * 4]
    assert run.learned == PrecisionOverrides(wide=True)
    assert run.learner.attempt.wide and "the residual stream reaches" in run.report.steps[0].note


def test_a_stream_that_is_planned_wide_fails_nowhere():
    module = build()
    overflow_stream(module, 1)
    run = sample(guarded(module, wide=True))
    assert run.outcomes == ["finite"] * 5 and run.learned == PrecisionOverrides()


def test_stream_and_inner_overflow_at_once():
    module = build()
    overflow_stream(module, 1)
    overflow_inside(module, 2)
    run = sample(guarded(module))
    assert run.report.reruns == 1
    assert run.learned == PrecisionOverrides(wide=True, wide_parts=("blocks.2",)) and run.learner.attempt.wide


def test_a_stream_that_starts_beyond_the_range_is_wide_from_its_start():
    module = build()
    with torch.no_grad():
        module.embed.weight.mul_(1.5e5)
    run = sample(guarded(module))
    assert run.report.reruns == 1 and run.learned == PrecisionOverrides(wide=True)


def test_where_the_stream_is_not_known_every_layer_is_wide_from_then_on():
    module = build()
    overflow_stream(module, 1)
    run = sample(guarded(module, stream=None))
    assert run.outcomes == ["rerun", *["finite"] * 4] and run.dtypes == ["fp32", *["fp16"] * 4]
    assert run.learned == PrecisionOverrides(everything=True) and run.learner.attempt.everything
    assert "'blocks.1' puts out" in run.report.steps[0].note
    assert run.rerun(0).action == "every layer wide from the next call on"
    assert sample(guarded(module, stream=None, learned=run.learned)).report.reruns == 0
    assert run(latents() * 1e6).isfinite().all() and run.outcomes[-1] == "finite", "what it is given need not fit"


def test_where_that_fails_too_the_rest_of_the_run_is_in_fp32():
    module = fail_even_wide(build(), 2)
    overflow_stream(module, 1)
    run = sample(guarded(module, stream=None))
    assert run.outcomes == ["rerun", "rerun", *["finite"] * 3] and run.dtypes == ["fp32"] * 5
    assert [run.rerun(step).action for step in range(2)] == [
        "every layer wide from the next call on",
        "the rest of the run in fp32",
    ]
    assert run.learned == PrecisionOverrides(whole_run_fp32=True), "it did not help, and later runs would pay for it"


def test_what_is_planned_with_every_layer_wide_leaves_half_precision_at_once():
    run = sample(guarded(fail_even_wide(build(), 2), everything=True))
    assert run.outcomes == ["rerun", *["finite"] * 4] and run.dtypes == ["fp32"] * 5
    assert run.rerun(0).action == "the rest of the run in fp32", "neither a part nor all of it can be wider"
    assert run.learned == PrecisionOverrides(whole_run_fp32=True)


def test_bf16_which_has_fp32s_range_is_not_made_wider():
    run = guarded(build(dtype="bf16"), "bf16", stream=None)
    assert run.learner.learn(OverflowDiagnosis("", hopeless=True)) == "the rest of the run in fp32"
    assert run.learner.learned == PrecisionOverrides(whole_run_fp32=True) and len(run.built) == 1


def test_a_module_that_cannot_be_wide_leaves_half_precision(caplog):
    module = build()
    overflow_stream(module, 1)
    run = guarded(module, stream=Stream("blocks", ("embed",), ("write",), ("norm",), ("last_norm",)))
    block: Any = module.blocks[0]
    block.write = nn.Sequential(block.write)  # no Linear any more
    with pytest.raises(CannotWiden):
        run.learner._build(PrecisionOverrides(wide=True))
    sample(run)
    assert run.dtypes == ["fp32"] * 5 and "only a Linear or a convolution can be wide" in caplog.text
    assert run.learned == PrecisionOverrides(whole_run_fp32=True)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_fault_that_fp32_does_not_show_is_located_in_the_half_call(dtype):
    faults = Faults({"blocks.3.inner": nan}, range(100))
    run = sample(guarded(build(dtype=dtype), dtype, faults=faults))
    assert run.outcomes == ["rerun", *["finite"] * 4]
    rerun = run.rerun(0)
    expected = {
        "fp16": PrecisionOverrides(wide_parts=("blocks.3",)),
        "bf16": PrecisionOverrides(islands=("blocks.3",)),
    }[dtype]
    assert (rerun.module, run.learned) == ("blocks.3.inner", expected)
    assert rerun.peak is not None and rerun.peak < 65504


def test_a_fault_that_does_not_come_back_teaches_nothing():
    run = guarded(build(), faults=Faults({"blocks.3": nan}, [1]))
    located = run.learner.locate
    run.learner.locate = lambda *a, **k: (setattr(run.faults, "calls", ()), located(*a, **k))[1]
    sample(run)
    assert run.outcomes == ["finite", "rerun", "finite", "finite", "finite"]
    assert run.learned == PrecisionOverrides() and "computed again it did not fail" in run.report.steps[1].note


def test_calls_that_go_on_failing_end_in_fp32_without_the_doomed_attempt():
    run, attempts = guarded(build(), stay_after=3), []

    class Broken(nn.Module):
        def forward(self, x):
            attempts.append(x)
            return (torch.full_like(x, math.nan if len(attempts) % 2 else 0.0),)  # never where it is looked for

    fail_always(run, Broken())
    sample(run, 6)
    assert run.outcomes == ["rerun"] * 3 + ["finite"] * 3 and run.dtypes == ["fp32"] * 6
    assert len(attempts) == 6, "each once more, to see where it fails"
    assert run.learned == PrecisionOverrides(whole_run_fp32=True)
    assert run.rerun(2).action == "the rest of the run in fp32"
    assert run.report.steps[3].note == "half precision is not tried any more"


def test_a_fault_outside_of_all_modules_cannot_be_helped():
    class Broken(nn.Module):
        def forward(self, x):
            return (x * math.inf,)

    run = guarded(build())
    fail_always(run, Broken())
    sample(run)
    assert run.outcomes == ["rerun", "rerun", *["finite"] * 3] and run.dtypes == ["fp32"] * 5
    assert run.built[1:] == [] and run.learned == PrecisionOverrides(whole_run_fp32=True)


def test_an_overflow_outside_of_the_blocks_makes_the_part_around_it_wide():
    module = build()
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    embed: Any = nn.Sequential(first, nn.SiLU(), last)
    module.embed = embed.half().requires_grad_(False)
    with torch.no_grad():
        first.weight.mul_(2.0**17)
        last.weight.mul_(2.0**-14)
    run = sample(guarded(module, stream=None))
    assert run.outcomes == ["rerun", *["finite"] * 4] and run.dtypes == ["fp32", *["fp16"] * 4]
    assert run.learned == PrecisionOverrides(wide_parts=("embed",)) and run.rerun(0).module == "embed.0"


@pytest.mark.parametrize("end", ["hopeless", "too many failures"])
def test_what_did_not_help_is_forgotten(end):
    run = guarded(build(), stream=None, learned=PrecisionOverrides(islands=("blocks.0",)))
    run(latents())
    run.learner.learn(OverflowDiagnosis("", islands=("blocks.1",)))
    run.learner.learn(OverflowDiagnosis("", islands=("blocks.2",)))
    run.learner.learn(OverflowDiagnosis("", islands=("blocks.2",)))
    tried = PrecisionOverrides(islands=("blocks.0", "blocks.2"), wide_parts=("blocks.1",))
    assert run.learner.learned == tried, "another place: both may be needed"
    if end == "hopeless":
        assert run.learner.learn(OverflowDiagnosis("", hopeless=True)) == "every layer wide from the next call on"
        assert run.learner.learn(OverflowDiagnosis("", hopeless=True)) == "the rest of the run in fp32"
    else:
        run.learner.stay()
    assert run.learner.learned == PrecisionOverrides(islands=("blocks.0",), whole_run_fp32=True), (
        "a call came out right with it"
    )


@pytest.mark.parametrize(
    ("overflow", "helped"),
    [
        (overflow_inside, PrecisionOverrides(wide_parts=("blocks.1",))),
        (overflow_stream, PrecisionOverrides(everything=True)),
    ],
)
def test_what_helped_is_kept_where_the_run_ends_in_fp32_all_the_same(overflow, helped):
    module = build()
    overflow(module, 1)
    run = sample(guarded(module, stream=None))
    assert run.learned == helped
    run.learner.stay()
    assert run.learner.learned == replace(helped, whole_run_fp32=True)


def test_islands_from_an_earlier_run_are_forgotten_where_no_call_comes_out_right_with_them():
    module = build()
    overflow_stream(module, 1)
    run = sample(guarded(module, stream=None, learned=PrecisionOverrides(islands=("blocks.3",))))
    assert run.outcomes == ["rerun", *["finite"] * 4] and run.learned == PrecisionOverrides(everything=True)


def test_scope_run_stays_in_fp32_after_the_first_failure():
    module = build()
    overflow_inside(module, 2)
    run = sample(guarded(module, scope=Scope.RUN))
    assert run.outcomes == ["rerun", *["finite"] * 4] and run.dtypes == ["fp32"] * 5
    assert len(run.built) == 1 and run.learned is None, "nothing is learned"


def test_scope_run_attempts_half_precision_until_something_fails():
    run = sample(guarded(build(), scope=Scope.RUN, faults=Faults({"blocks.1": nan}, [2])))
    assert run.dtypes == ["fp16", "fp16", "fp32", "fp32", "fp32"]
    run(latents(), timestep=torch.tensor([700]))
    assert run.report.steps[-1].timestep == 700


def test_what_was_learned_holds_from_the_first_call_of_the_next_run():
    module = build()
    overflow_stream(module, 1)
    overflow_inside(module, 2)
    learned = sample(guarded(module)).learned
    assert sample(guarded(module, learned=learned)).report.reruns == 0
    whole = sample(guarded(module, learned=PrecisionOverrides(whole_run_fp32=True)))
    assert whole.outcomes == ["finite"] * 5 and whole.dtypes == ["fp32"] * 5


def test_an_input_that_does_not_fit_teaches_nothing():
    module = build()
    run = guarded(module)
    with torch.no_grad():
        module.embed.weight.mul_(1e-3)
    for call in range(4):
        run(latents(call) * 1e5)
    assert run.learned.parts == () and len(run.built) == 1
    assert run.outcomes == ["rerun"] * 3 + ["finite"], "but it counts"
    assert run.report.steps[0].note == "its input does not fit in fp16"


def test_reruns_in_the_report():
    module = build()
    overflow_inside(module, 2)
    run = sample(guarded(module))
    run.report.learned = run.learned
    step, *rest = run.report.steps
    assert isinstance(step.rerun, Rerun) and all(later.rerun is None for later in rest)
    assert 0 < step.rerun.seconds <= step.seconds
    assert step.rerun.extra_bytes == 4 * (8 * 8 + 8), "the largest layer's weights and bias in float32"
    facts = run.report.as_dict()
    assert facts["rerun_seconds"] == step.rerun.seconds and facts["learned"]["wide_parts"] == ["blocks.2"]
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert "'blocks.2' wide; 5 steps, 1 rerun" in run.report.summary()
    assert max(map(len, run.report.text().splitlines())) < 240


def test_what_is_not_finite_is_a_word_in_json():
    run = guarded(build())
    rerun = Rerun("a", math.inf, "", 1.0, None)
    run.report.add(StepRecord("denoiser", 0, math.nan, "fp32", "rerun", 1.0, -math.inf, rerun=rerun))
    (step,) = run.report.as_dict()["steps"]
    assert (step["rerun"]["peak"], step["timestep"], step["largest"]) == ("inf", "nan", "-inf")
    json.dumps(run.report.as_dict(), allow_nan=False)


def test_a_compiled_shell_is_reused_when_something_is_learned():
    from test_islands import Compiler

    compiler, module = Compiler(), build(6)
    overflow_inside(module, 2)
    with torch.no_grad():
        run = sample(guarded(module, stream=STREAM, compiled=compiler.compiled))
    assert run.outcomes == ["rerun", *["finite"] * 4] and compiler.graphs == 1
