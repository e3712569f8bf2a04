"""What a profile says of the residual stream is looked at in the first call, so that none can ruin a picture."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from comfyui_onediff_guard.pipelines.encode import encode_prompts
from comfyui_onediff_guard.pipelines.families import COGVIDEOX
from comfyui_onediff_guard.pipelines.handle import load
from comfyui_onediff_guard.pipelines.memory import here
from comfyui_onediff_guard.pipelines.placement import PlainPlacement
from comfyui_onediff_guard.pipelines.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure, Scope
from comfyui_onediff_guard.precision.learned import Learned
from comfyui_onediff_guard.precision.policy import Precision

SMALL = SampleSettings(width=64, height=48, frames=9, steps=2, guidance_scale=6.0, seed=3, scheduler="DDIM")
STEP, LEARNED = GuardPolicy(), GuardPolicy(scope=Scope.LEARNED)
OFF = GuardPolicy(on_failure=OnFailure.OFF)
TRUE_PEAK = 5.1e5  # of the overflowing model


@lru_cache
def in_fp32(folder):
    return sampled(folder, "fp32", STEP, None)[0]


def sampled(folder, precision, policy, learned):
    handle = load(
        folder,
        COGVIDEOX,
        precision=Precision.FP32,
        backend="eager",
        offload="none",
        placement=PlainPlacement(),
    )
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    given = replace(here(handle, "fp16"), learned=learned) if learned else None
    handle = replace(handle, precision=Precision(precision), policy=policy, profile=given)
    return sample(handle, positive, negative, SMALL)


def error(folder, latents):
    return ((latents - in_fp32(folder)).norm() / in_fp32(folder).norm()).item()


@pytest.mark.parametrize("policy", [STEP, LEARNED, OFF], ids=["step", "learned", "off"])
@pytest.mark.parametrize("overflow", ["none", "stream"])
@pytest.mark.parametrize("peak", [1.0, 6e7, 1e10])
def test_no_peak_makes_the_result_worse(model_folder, peak, overflow, policy):
    """The last is more than a profile may say (`parse` refuses it), and is found out all the same."""
    folder = model_folder("5b", overflow)
    latents, report = sampled(folder, "fp16", policy, Learned(peak))
    assert error(folder, latents) < 0.005 and len(report.steps) == SMALL.steps and report.failed == 0
    assert len([note for note in report.notes if "profile" in note]) == 1


@pytest.mark.parametrize(
    ("overflow", "peak", "found"),
    [("none", 6e7, "and here that reaches 2.7"), ("stream", 1.0, "and here that leaves fp16's range at 2^-0")],
)
def test_a_peak_that_is_not_true_is_named_and_measured_anew(model_folder, overflow, peak, found):
    _, report = sampled(model_folder("5b", overflow), "fp16", STEP, Learned(peak))
    (said,) = [note for note in report.notes if "profile" in note]
    assert said.startswith(
        f"the profile that was given is left alone: it says that the residual stream peaks at {peak:.3g}"
    )
    assert found in said and report.stream_peak is not None


def test_a_true_peak_costs_no_step(model_folder):
    folder = model_folder("5b", "stream")
    latents, report = sampled(folder, "fp16", STEP, Learned(TRUE_PEAK))
    assert report.reruns == 0 and report.stream_peak is None and report.fold_bits == 5
    assert {step.dtype for step in report.steps} == {"fp16"} and error(folder, latents) < 0.005


@pytest.mark.parametrize("island", ["transformer_blocks", "transformer_blocks.0.attn1", "", "transformer_blocks.9"])
def test_parts_that_no_run_would_name_are_refused(model_folder, island):
    _, report = sampled(model_folder("5b"), "fp16", LEARNED, Learned(None, (island,)))
    assert f"is left alone: this model has no part '{island}'" in str(report.notes)
