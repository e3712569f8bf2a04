"""A step cache in whole runs of each family: nothing differs where it is off, and what it keeps survives all else that
a run may meet."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import at_once
from comfyui_onediff_guard.demo.small_model import build_cogvideox
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run import denoiser as denoising
from comfyui_onediff_guard.pipelines.run.feature import _ClippedValues
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.run.step_cache import CachedRun
from comfyui_onediff_guard.precision.error_estimate import FIRST, LAST, CachePolicy
from comfyui_onediff_guard.precision.fallback import HalfPrecisionForward
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure, Scope
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.precision.quantised import STEP
from lora_models import training
from small_runs import error, opened, prompts, start_of

SIZES = {
    "2b": (96, 64, 9),
    "5b": (96, 64, 9),
    "1.5": (96, 64, 9),
    "5b-i2v": (96, 64, 9),
    "cogview3": (64, 64, 1),
    "cogview4": (64, 64, 1),
    "wan": (64, 48, 5),
    "wan-two": (64, 48, 5),
    "svd": (64, 64, 2),
}
STEPS = 12
WIDE = CachePolicy(error=0.5, check_every=3)  # random weights change from step to step more than trained ones


def run(
    handle: PipelineHandle, model: str, policy: CachePolicy | None = None, tell: Any = None, **more: Any
) -> tuple[torch.Tensor, Any]:
    width, height, frames = SIZES[model]
    guidance = 3.0 if handle.family.prompt else None
    settings = SampleSettings(width, height, steps=STEPS, seed=3, frames=frames, guidance_scale=guidance)
    start = start_of(handle, width, height)
    handle, settings = replace(handle, step_cache=policy), replace(settings, **more)
    positive, negative = prompts(handle)
    return sample(handle, positive, negative, settings, tell=tell, **start)


def cached(handle: PipelineHandle, model: str, wanted: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A run with a cache, which was used, and is as near to what is wanted as was asked for."""
    found, report = run(handle, model, WIDE)
    assert report.cache.cached
    assert torch.isfinite(found).all() and error(found, wanted) <= max(report.cache.drift, WIDE.error)
    return found, report


MODELS = [model for model in SIZES if model != "svd"]


@pytest.mark.parametrize("frames", [2, 5])
def test_stable_video_diffusion_has_no_step_cache_and_says_so(frames: int) -> None:
    """On random weights its drift was 5.8 to 13.5 %, where 0.2 to 1.9 % was estimated. A workflow that asks for it
    runs, and computes every step."""
    handle = opened("svd")
    told: list[str] = []
    plain, before = run(handle, "svd", frames=frames)
    found, report = run(handle, "svd", WIDE, frames=frames, tell=told.append)
    assert torch.equal(found, plain) and report.cache is None and "cached" not in report.cells()
    (said,) = report.warnings
    assert said.startswith("The step cache is not used") and said in told and not before.warnings


@pytest.mark.parametrize("model", MODELS)
def test_every_family(model: str) -> None:
    handle = opened(model)
    plain, before = run(handle, model)
    assert before.cache is None and "cached" not in before.cells()
    compared, report = run(handle, model, CachePolicy(1e-9))  # which compares, and caches nothing
    assert report.cache.compared and not report.cache.cached and torch.equal(compared, plain)
    found, report = cached(handle, model, plain)
    cells, use = report.cells(), report.cache
    assert use.cached == cells.count("cached") >= 2, report.text()
    assert len(cells) == STEPS and "cached" not in (*cells[:FIRST], *cells[-LAST:])
    assert not torch.equal(found, plain)
    assert f"{use.cached} of {STEPS} steps cached" in report.text()
    assert [step.cached for step in report.steps].count(True) == use.cached * report.calls_per_step
    assert torch.equal(run(handle, model)[0], plain)  # nothing is left of it


@pytest.mark.parametrize("model", ["2b", "cogview4"])
@pytest.mark.parametrize("failing", [0, FIRST, 7, STEPS - 1])
def test_nan_at_any_step(monkeypatch: pytest.MonkeyPatch, model: str, failing: int) -> None:
    """An attempt that is NaN is computed again in full, has the bits of the model in fp32, and leaves no trace."""
    handle = opened(model, precision="bf16")
    at = failing * (2 if model == "cogview4" else 1)  # calls of a step
    report = cached_with_nan(monkeypatch, handle, model, at)
    assert not report.steps[at].cached and report.cells()[failing] == "rerun"


def cached_with_nan(monkeypatch: pytest.MonkeyPatch, handle: PipelineHandle, model: str, at: int) -> Any:
    """The report of a run with a cache in which a call is NaN: it comes to what it comes to without a cache."""
    handle = replace(handle, policy=GuardPolicy(scope=Scope.STEP))
    broken_at(monkeypatch, at)
    wanted, without = run(handle, model)
    _, report = cached(handle, model, wanted)
    assert [step.outcome for step in report.steps] == [step.outcome for step in without.steps]
    assert report.steps[at].outcome == "rerun"
    return report


def test_a_run_that_gives_up_half_precision_caches_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = replace(opened("2b", precision="bf16"), policy=GuardPolicy(scope=Scope.RUN))
    broken_at(monkeypatch, 7)
    _, report = run(handle, "2b", WIDE)
    assert "cached" in report.cells()[:7] and set(report.cells()[8:]) == {"fp32"}


def test_what_a_guard_that_is_off_lets_through_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = replace(opened("2b", precision="bf16"), policy=GuardPolicy(on_failure=OnFailure.OFF))
    broken_at(monkeypatch, 4)
    found, report = run(handle, "2b", WIDE)
    assert report.steps[4].outcome == "non-finite" and not torch.isfinite(found).all()
    assert "the guard let an output through" in report.cache.stopped and "cached" not in report.cells()[4:]
    assert math.isfinite(report.cache.drift)


def broken_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The attempt of one step is NaN."""
    make = denoising.build_attempt

    def build(stage: Any, *args: Any) -> Any:
        made = make(stage, *args)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            output = made.run(*args, **kwargs)
            return (output[0] * torch.nan,) if len(stage.report.steps) == step else output

        return replace(made, run=attempt)

    monkeypatch.setattr(denoising, "build_attempt", build)


@pytest.mark.parametrize("overflow", ["none", "stream"])
@pytest.mark.parametrize("model", ["2b", "cogview3", "cogview4"])
def test_overflow_protection(model: str, overflow: str) -> None:
    handle = opened(model, precision="fp16", overflow=overflow)
    _, report = cached(handle, model, run(handle, model)[0])
    assert report.protection and not report.reruns
    assert not any(step.note for step in report.steps), "blocks that are left out leave no plan"


def test_bf16_with_every_layer_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    known = PrecisionOverrides(all_layers_scaled=True)
    monkeypatch.setattr(denoising, "_known", lambda _stage: (known, ()))
    handle = opened("2b", precision="bf16")
    cached(handle, "2b", run(handle, "2b")[0])


@pytest.fixture
def halves_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    init = denoising.GuardedDenoiser.__init__

    def halved(steps: Any, *args: Any) -> None:
        init(steps, *args)
        steps._savings = ("CFG halves in turn",)

    monkeypatch.setattr(denoising.GuardedDenoiser, "__init__", halved)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.usefixtures("halves_in_turn")
def test_what_either_half_clips_is_seen(half: int) -> None:
    handle = opened("cogview3", precision="fp16 (plain)")
    calls = itertools.count()

    def clipped(_block: Any, _given: Any, made: Any) -> Any:
        return ((made[0] + math.inf).clip(-65504, 65504), *made[1:]) if next(calls) % 2 == half else made

    hook = handle.store.module("transformer", "fp16").transformer_blocks[1].register_forward_hook(clipped)
    _, report = run(handle, "cogview3")
    hook.remove()
    assert next(calls) == 2 * STEPS
    assert {step.outcome for step in report.steps} == {"non-finite"}, "it was clipped from there"


@pytest.mark.parametrize("together", [False, True])
def test_what_an_earlier_attempt_clipped_is_none_of_a_scaled_one(together: bool) -> None:
    def clips(x: torch.Tensor) -> torch.Tensor:
        return (x + math.inf).clip(-65504, 65504)

    feature = _ClippedValues("fp16", together=together)
    feature.wrap_attempt(HalfPrecisionForward(clips, clips)).run(torch.ones(2).half())
    assert feature.peak_inside() == math.inf
    feature.wrap_attempt(HalfPrecisionForward(clips, clips, all_layers_scaled=True))
    assert feature.peak_inside() is None


@pytest.mark.parametrize("model", ["2b", "5b"])
@pytest.mark.usefixtures("halves_in_turn")
def test_halves_apart(model: str) -> None:
    handle = opened(model)
    cached(handle, model, run(handle, model)[0])


def test_where_memory_runs_out_the_cache_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = opened("2b")
    plain, _ = run(handle, "2b")
    make, failures = denoising.build_attempt, [0, 0]

    def build(stage: Any, *args: Any) -> Any:
        made = make(stage, *args)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if len(stage.report.steps) == 6 and failures:
                failures.pop()
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return made.run(*args, **kwargs)

        return replace(made, run=attempt)

    monkeypatch.setattr(denoising, "build_attempt", build)
    place, kept = denoising.GuardedDenoiser._place, []

    def placed(denoiser: Any, inputs: Any) -> None:
        caches = [feature._caches for feature in denoiser._features if isinstance(feature, CachedRun)]
        kept.append(sum(len(cache.history) for found in caches for cache in found.values()))
        place(denoiser, inputs)

    monkeypatch.setattr(denoising.GuardedDenoiser, "_place", placed)
    _, report = cached(handle, "2b", plain)
    text = report.text()
    assert kept == [0, 1, 0], "its values are gone before the denoiser is placed anew"
    assert "went on with nothing else on the device" in text and "went on with none, no step cache" in text
    assert "halves" not in text and "cached" not in report.cells()[6:]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_compiled_blocks(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """A cached step runs what is compiled of the parts that it computes."""
    handle = opened("2b", precision=precision, backend="inductor")
    run(handle, "2b")  # what it shows of its layers in fp16 is known from the next run's first step on
    plain, _ = run(handle, "2b")
    found, report = run(handle, "2b", CachePolicy(0.0))
    assert torch.equal(found, plain) and report.graphs == 0
    assert cached(handle, "2b", plain)[1].backend == "inductor"
    assert run(handle, "2b", WIDE)[1].graphs == 0
    if precision != "fp32":  # which is not attempted, but the model's own
        cached_with_nan(monkeypatch, handle, "2b", at=7)


def test_two_threads() -> None:
    """Each run has its own cache, on one model."""
    handle = opened("2b")
    alone = {seed: run(handle, "2b", WIDE, seed=seed)[0] for seed in (3, 4)}
    found = at_once(*(partial(run, handle, "2b", WIDE, seed=seed) for seed in alone))
    assert all(torch.equal(made, right) for (made, _), right in zip(found, alone.values(), strict=True))


def test_a_denoiser_of_one_block_says_that_nothing_can_be_cached(tmp_path: Path) -> None:
    handle = opened(build_cogvideox(tmp_path / "one", layers=1))
    _, report = run(handle, "2b", WIDE)
    assert "no step is cached" in report.text() and "cached" not in report.cells()


@pytest.mark.parametrize("precision", ["fp16", "fp16 (plain)", "bf16", "int8"])
def test_every_precision(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """A target of 0 is bit-equal, and a NaN in a cached run comes to what it comes to without a cache."""
    monkeypatch.setattr("comfyui_onediff_guard.precision.quantised.LEAST", STEP)  # small: int8 is slow on CPUs
    handle = opened("2b", precision=precision)
    assert handle.plan(Component.DENOISER).numerics == precision.partition(" ")[0]
    plain, _ = run(handle, "2b")
    assert torch.equal(run(handle, "2b", CachePolicy(0.0))[0], plain)
    cached(handle, "2b", plain)
    if precision != "fp16 (plain)":  # in which nothing is recomputed
        cached_with_nan(monkeypatch, handle, "2b", at=7)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_lora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str) -> None:
    handle = opened("2b", precision=precision)
    bare, _ = run(handle, "2b")
    trained = training(tmp_path)(handle.store.module("transformer", precision))
    handle = add_lora(handle, Lora(trained, 1.0))
    plain, _ = run(handle, "2b")
    assert error(plain, bare) > 0.001, "it does something"
    assert torch.equal(run(handle, "2b", CachePolicy(0.0))[0], plain)
    found, _ = cached(handle, "2b", plain)
    assert error(found, bare) > error(found, plain), "cached steps have it too"
    cached_with_nan(monkeypatch, handle, "2b", at=7)
