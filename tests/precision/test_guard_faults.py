"""Injected faults of every kind, place and call: detected, located, recomputed, with no state left behind."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from at_once import at_once
from blocky import Faults, build, guarded, latents
from comfyui_onediff_guard.precision.guard import RENEWED, GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides
from guards import in_fp32
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import by_tier

NAN, INF = math.nan, math.inf
SCALED, REST = PrecisionOverrides(all_layers_scaled=True), "the rest of the run in fp32"
PLACES = {  # in a module's output, [batch, frames, channels]
    "one element": (1, 2, 3),
    "all": ...,
    "the unconditional half": 0,
    "the last frame": (slice(None), -1),
}


def spoil(value, place):
    return lambda made: made.__setitem__(place, value)


def state(module):
    """Everything that a guard might leave on a module."""
    return {
        name: (
            id(part),
            part.__dict__.keys() - {"_forward_hooks_with_kwargs"},
            {key: id(child) for key, child in part._modules.items()},
            {key: (id(p), p.dtype, p._version, p.data_ptr()) for key, p in part._parameters.items()},
            {key: (id(p), p.dtype, p._version) for key, p in part._buffers.items()},
            [len(getattr(part, hooks)) for hooks in vars(part) if "hooks" in hooks],
            "forward" in vars(part),
        )
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize("calls", [[0], [4], [1, 2, 3], range(5)], ids=str)
@pytest.mark.parametrize("scope", Scope)
def test_scope_decides_precision_of_calls_after_a_failure(calls, scope):
    assert GuardPolicy().scope is Scope.LEARNED, "the default is to learn"
    module = build(dtype="bf16")
    run = guarded(module, "bf16", scope=scope, give_up_after=9, faults=Faults({"blocks.1": spoil(NAN, 0)}, calls))
    for call in range(5):
        found = run(latents(call), timestep=torch.tensor([100 * call]))
        assert (found - in_fp32(module, latents(call))).abs().max() < 0.1
    failed = list(calls) if scope is Scope.STEP else list(calls)[:1]
    assert [index for index, step in enumerate(run.report.steps) if step.outcome == "rerun"] == failed
    assert [run.rerun(call).module for call in failed] == ["blocks.1", "", "", "", ""][: len(failed)], "located once"
    in_half = {
        Scope.STEP: [call not in calls for call in range(5)],
        Scope.LEARNED: [call != failed[0] for call in range(5)],
        Scope.RUN: [call < failed[0] for call in range(5)],
    }
    assert [dtype == "bf16" for dtype in run.dtypes] == in_half[scope]
    assert [step.timestep for step in run.report.steps] == [0, 100, 200, 300, 400]
    if scope is not Scope.LEARNED:
        assert run.rerun(failed[0]).action == ("" if scope is Scope.STEP else REST)
        assert run.learned is None and len(run.built) == 1


@pytest.mark.parametrize("give_up_after", [1, 2])
def test_report_names_protection_only_if_a_call_had_it(give_up_after):
    run = guarded(build(), give_up_after=give_up_after, faults=Faults({"blocks.1": spoil(NAN, 0)}, [0]))
    for call in range(2):
        run(latents(call))
    assert run.rerun(0).action == (REST if give_up_after == 1 else "overflow protection from here on")
    assert bool(run.report.protection) == (run.dtypes[1] != "fp32") == (give_up_after > 1)


@pytest.mark.parametrize(("dtype", "learned"), [("fp16", SCALED), ("bf16", NOTHING)])  # bf16 has a larger range
def test_saturation_is_a_located_failure_only_in_fp16(dtype, learned):
    run = guarded(build(dtype=dtype), dtype, faults=Faults({"out": spoil(65504.0, (0, 0, 0))}, [0]))
    run(latents())
    assert run.outcomes == ["rerun" if learned is SCALED else "finite"] and run.learned == learned
    assert run.report.steps[0].note.startswith("clipped in fp16: 'out'") == (learned is SCALED)


@pytest.mark.parametrize("at", [1, 2, 3], ids=["in the attempt", "in the rerun", "while it is located"])
def test_interrupt_leaves_module_and_report_unchanged(at):
    module = build()
    before = state(module)
    run = guarded(module, faults=Faults({"blocks.1": spoil(NAN, 0)}, range(9)))
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt

    hook = module.blocks[2].norm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(latents())
    hook.remove()
    assert len(calls) == at
    assert state(module) == before and torch.overrides._get_current_function_mode() is None
    assert run.report.steps == [] and run.learned == NOTHING
    run(latents())
    assert run.outcomes == ["rerun"] and run.learned == SCALED
    assert state(module) == before


def test_threads_sharing_a_module_learn_independently():
    module = build(6, dtype="bf16")
    before, calls = state(module), 12
    runs = [guarded(module, "bf16", faults=Faults({f"blocks.{i}.inner": spoil(NAN, 0)}, [i, 6])) for i in range(4)]

    def work(index):
        for call in range(calls):
            x = latents(100 * index + call)
            assert (runs[index](x) - in_fp32(module, x)).abs().max() <= 0.2, (index, call)

    at_once(*(partial(work, index) for index in range(len(runs))))
    for index, run in enumerate(runs):
        assert run.outcomes == ["rerun" if call == index else "finite" for call in range(calls)]
        assert run.rerun(index).module == f"blocks.{index}.inner" and run.learned == SCALED
    assert state(module) == before


MODULES = ("embed", "last_norm", "out", "block", "block.norm", "block.inner", "block.write")


@settings(max_examples=by_tier(150, 40))
@given(
    data=st.data(),
    dtype=st.sampled_from(["fp16", "bf16"]),
    scope=st.sampled_from(Scope),
    seed=st.integers(0, 2**20),
    protected=st.booleans(),
)
def test_fault_in_any_module_is_located_and_recomputed(data, dtype, scope, seed, protected):
    """With overflow protection, only in fp16: values computed in float32 cannot have the fault."""
    blocks, calls = data.draw(st.integers(1, 5), "blocks"), 4
    block = f"blocks.{data.draw(st.integers(0, blocks - 1), 'block')}"
    name = data.draw(st.sampled_from(MODULES), "module").replace("block", block)
    at = data.draw(st.integers(0, calls - 1), "call")
    value = data.draw(st.sampled_from([NAN, INF, -INF]), "value")
    place = data.draw(st.sampled_from(list(PLACES.values())), "place")
    module = build(blocks, dtype, seed)
    faults, protected = Faults({name: spoil(value, place)}, [at]), protected and dtype == "fp16"
    run = guarded(module, dtype, scope=scope, faults=faults, all_layers_scaled=protected)
    before = state(module)
    for call in range(calls):
        x = latents(seed + call)
        found, expected = run(x), in_fp32(module, x)
        if call == at and not protected:
            assert torch.equal(found, expected)
        assert (found - expected).abs().max() < 0.15 and state(module) == before
    check_totals(run.report)
    if protected:
        assert run.outcomes == ["finite"] * calls and run.learner.learned == NOTHING
        assert [step.note == RENEWED for step in run.report.steps] == [
            call == at and faults.met for call in range(calls)
        ]
        return
    assert run.outcomes == ["rerun" if call == at else "finite" for call in range(calls)]
    rerun = run.rerun(at)
    assert rerun.module == name
    assert run.learner.learned == PrecisionOverrides(
        all_layers_scaled=scope is Scope.LEARNED, whole_run_fp32=scope is Scope.RUN
    )


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_overflow_in_protected_step_is_not_taken_for_a_mask(value, place):
    """A layer in fp16 can overflow to one side only, as a mask does."""
    module = build()
    run = guarded(module, faults=Faults({"out": spoil(value, place)}, [1]), all_layers_scaled=True)
    for call in range(3):
        assert (run(latents(call)) - in_fp32(module, latents(call))).abs().max() < 0.15
    assert [step.note == RENEWED for step in run.report.steps] == [False, True, False]


def check_totals(report):
    facts = report.as_dict()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    steps = facts["steps"]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert sum(facts["outcomes"].values()) == len(steps)
    assert facts["reruns"] == facts["outcomes"].get("rerun", 0) == sum(step["rerun"] is not None for step in steps)
    assert facts["seconds"] == pytest.approx(sum(step["seconds"] for step in steps))
    reruns = [step["rerun"] for step in steps if step["rerun"]]
    assert facts["rerun_seconds"] == pytest.approx(sum(rerun["seconds"] for rerun in reruns))
    assert all(step["rerun"] is None or 0 < step["rerun"]["seconds"] <= step["seconds"] for step in steps)
    how = f"{facts['reruns']} recomputed in fp32" if facts["reruns"] else "all fine"
    assert facts["summary"].endswith(f", {how}.")
