"""'auto' compiles where that pays: pure decisions, a clock that nobody reads, and what the sampler says."""

from __future__ import annotations

from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.compile.backends import EAGER, BackendChoice
from comfyui_onediff_guard.pipelines.compile.payoff import COMPILE_GUESS, FASTER_GUESS, Measured, Taken, decide, learn
from comfyui_onediff_guard.precision.report import Rerun, StepRecord

SIZE = (720, 480, 49, True)


def steps(*seconds: float) -> list[StepRecord]:
    return [StepRecord("denoiser", n, None, "fp16", "finite", each, 1.0) for n, each in enumerate(seconds)]


def run(known: Measured, calls: int, eager: float, compiled: float, compiling: float) -> tuple[bool, float]:
    """A run as the sampler makes it → whether it compiled, and its seconds."""
    hand = any(taken.compiled for taken in known.sizes.values())
    pays, _ = decide(known, SIZE, calls, at_hand=hand)
    each = compiled if pays else eager
    first = each + (compiling if pays and not hand else 0)
    learn(known, SIZE, steps(first, *[each] * (calls - 1)), compiled=pays, graphs=int(pays and not hand))
    return pays, first + each * (calls - 1)


def test_the_first_run_is_eager_and_says_why() -> None:
    assert decide(Measured(), SIZE, 50, at_hand=False) == (
        False,
        "the first run at this size, to measure what compiling would save",
    )


def test_what_is_compiled_already_is_used_at_once() -> None:
    assert decide(Measured(), SIZE, 2, at_hand=True) == (True, "compiled already")


def test_what_was_slower_compiled_is_left_alone() -> None:
    known = Measured(sizes={SIZE: Taken(eager=1.0, compiled=1.1)})
    assert decide(known, SIZE, 50, at_hand=True) == (False, "a step compiled took 1.1 s here, and eager 1 s")


def test_a_long_run_compiles_in_the_second_and_a_short_one_does_not() -> None:
    known = Measured()
    learn(known, SIZE, steps(*[2.0] * 50), compiled=False, graphs=0)
    pays, why = decide(known, SIZE, 200, at_hand=False)
    assert pays and why == "compiling takes about 60 s, and this run of 200 × 2 s brings what it saves to 1e+02 s"
    few = Measured()
    learn(few, SIZE, steps(*[0.1] * 4), compiled=False, graphs=0)
    assert not decide(few, SIZE, 4, at_hand=False)[0]
    assert not decide(known, (64, 64, 1, True), 50, at_hand=False)[0], "another size is measured first"


@pytest.mark.parametrize("calls", [2, 4, 20, 50])
@pytest.mark.parametrize(("eager", "compiled"), [(0.05, 0.04), (1.0, 0.8), (2.0, 1.0), (10.0, 9.0), (1.0, 1.2)])
@pytest.mark.parametrize("compiling", [5.0, 60.0, 300.0])
def test_it_never_costs_much_more_than_knowing_all_beforehand(
    calls: int, eager: float, compiled: float, compiling: float
) -> None:
    """Over any number of runs: no more is lost than a compile, what it is guessed to be worth before anything compiled
    was measured, and a run on either side of the moment in which it pays."""
    known, total = Measured(), 0.0
    guessed = COMPILE_GUESS * max(eager - compiled, 0) / (FASTER_GUESS * eager)
    for runs in range(1, 200):
        total += run(known, calls, eager, compiled, compiling)[1]
        best = min(runs * calls * eager, runs * calls * compiled + compiling)
        assert total <= best + compiling + guessed + 2 * calls * max(eager, compiled)


def test_a_rerun_and_the_first_step_do_not_count_as_a_steps_time() -> None:
    known = Measured()
    slow = StepRecord("denoiser", 1, None, "fp32", "rerun", 5.0, 1.0, rerun=Rerun(*_rerun(4.0)))
    learn(known, SIZE, [*steps(9.0), slow, *steps(1.0, 1.0)], compiled=False, graphs=0)
    assert known.at(SIZE).eager == 1.0


def _rerun(seconds: float) -> tuple[Any, ...]:
    from dataclasses import fields

    return tuple(seconds if field.name == "seconds" else 1 for field in fields(Rerun))


def test_compiling_is_what_the_first_compiled_run_took_beyond_its_steps() -> None:
    known = Measured()
    learn(known, SIZE, steps(31.0, 1.0, 1.0, 1.0), compiled=True, graphs=2)
    assert (known.compile_seconds, known.at(SIZE).compiled) == (30.0, 1.0)
    learn(known, SIZE, steps(1.0, 1.0, 1.0, 1.0), compiled=True, graphs=0)
    assert known.compile_seconds == 30.0


def test_the_sampler_compiles_when_it_pays(model_folder: Any, tmp_path: Any, monkeypatch: Any) -> None:
    from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
    from comfyui_onediff_guard.comfyui_host import host
    from comfyui_onediff_guard.pipelines.compile import payoff

    monkeypatch.setattr(payoff, "COMPILE_GUESS", 1e-9)
    folder = model_folder("2b")
    with host.plain_folders(models=[folder.parent], input=tmp_path, output=tmp_path):
        nodes = {name: NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]() for name in ("EncodePrompt", "SampleCogVideoX")}
        said = []
        for backend in ("auto", "auto", "eager"):
            load = NODE_CLASS_MAPPINGS["OneDiffGuardLoadCogVideoX"]().load
            pipeline = load(folder.name, "fp32", backend, "none")[0]
            positive, negative = nodes["EncodePrompt"].encode(pipeline, "a boat", "", "inherit")["result"]
            report = nodes["SampleCogVideoX"].sample(
                pipeline,
                positive=positive,
                negative=negative,
                precision="inherit",
                width=96,
                height=64,
                frames=9,
                steps=2,
                guidance_scale=6.0,
                seed=1,
                scheduler="DDIM",
            )["result"][1]
            said.append(report)
    assert "the first run at this size, to measure what compiling would save" in said[0]
    assert "inductor" in said[1] and "brings what it saves to" in said[1]
    assert "asked for: not compiled" in said[2]


def test_a_backend_that_was_asked_for_is_left_alone() -> None:
    from comfyui_onediff_guard.pipelines.compile.payoff import where_it_pays

    class Handle:
        backend = BackendChoice("inductor", "asked for")

    handle: Any = Handle()
    assert where_it_pays(handle, None, None) is handle  # pyright: ignore[reportArgumentType]
    handle.backend = BackendChoice(EAGER, "auto: no inductor", automatic=True)
    assert where_it_pays(handle, None, None) is handle  # pyright: ignore[reportArgumentType]
