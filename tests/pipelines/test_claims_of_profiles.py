"""What a profile says of a model is true, or refused, or costs time alone: none can ruin a picture."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.denoiser import PROFILE_UNUSED
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load, profile_of
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure, Scope
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides
from comfyui_onediff_guard.precision.policy import Precision

SMALL = SampleSettings(width=64, height=48, frames=9, steps=2, guidance_scale=6.0, seed=3, scheduler="DDIM")
STEP, LEARNED = GuardPolicy(scope=Scope.STEP), GuardPolicy(scope=Scope.LEARNED)
OFF = GuardPolicy(on_failure=OnFailure.OFF, scope=Scope.LEARNED)
SCALED = PrecisionOverrides(all_layers_scaled=True)


@lru_cache
def unlearned(folder, precision):
    return sampled(folder, precision, STEP, None)[0]


def sampled(folder, precision, policy, learned):
    """Latents and report. learned: by a profile that was made in half precision; None: there is no profile."""
    handle = load(
        folder,
        COGVIDEOX,
        precision=Precision.FP32,
        backend="eager",
        offload="none",
        placement=PlainPlacement(),
    )
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    given = replace(profile_of(handle, "transformer", precision), learned=learned) if learned else None
    handle = replace(handle, precision=Precision(precision), policy=policy, profile=given)
    return sample(handle, positive, negative, SMALL)


def error(folder, latents):
    right = unlearned(folder, "fp32")
    return ((latents - right).norm() / right.norm()).item()


@pytest.mark.parametrize("policy", [LEARNED, OFF], ids=["learned", "off"])
@pytest.mark.parametrize(("precision", "overflow"), [("bf16", "none"), ("fp16", "none"), ("fp16", "stream")])
@pytest.mark.parametrize(
    "learned",
    [SCALED, PrecisionOverrides(unquantised=("transformer_blocks.9",)), PrecisionOverrides(fp16_error=1.0)],
    ids=["scaled", "unquantised", "fp16 accumulation"],
)
def test_no_claim_makes_the_result_worse(model_folder, learned, precision, overflow, policy):
    """In fp16 every layer is scaled anyway. In bf16 that has float32 where bf16 would round."""
    folder = model_folder("5b", overflow)
    latents, report = sampled(folder, precision, policy, learned)
    assert [(step.dtype, step.outcome) for step in report.steps] == [(precision, "finite")] * SMALL.steps
    without = unlearned(folder, precision)
    if precision == "bf16" and learned == SCALED:
        assert report.protection and error(folder, latents) < 0.7 * error(folder, without)
    else:
        assert bool(report.protection) == (precision == "fp16") and torch.equal(latents, without)
    assert [note.startswith("from a profile: ") for note in report.notes if "profile" in note] == [True]


def test_where_nothing_is_learned_no_profile_is_read(model_folder):
    folder = model_folder("5b")
    latents, report = sampled(folder, "bf16", STEP, SCALED)
    assert [note for note in report.notes if "profile" in note] == [PROFILE_UNUSED]
    assert report.learned is None and not report.protection and torch.equal(latents, unlearned(folder, "bf16"))


@pytest.mark.parametrize("precision", ["fp16", "fp16 (plain)", "fp32"])
@pytest.mark.parametrize("policy", [STEP, LEARNED], ids=["step", "learned"])
def test_a_profile_that_is_not_used_is_told(model_folder, policy, precision):
    folder = model_folder("2b")
    for learned in (SCALED, None):
        _, report = sampled(folder, precision, policy, learned)
        unused = precision != "fp16" or policy is STEP
        assert (PROFILE_UNUSED in report.notes) == (unused and learned is not None)
