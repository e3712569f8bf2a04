"""What a profile says of a model's parts is true, or refused, or costs time alone: none can ruin a picture."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.run.profiles import profile_of
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure, Scope
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides
from comfyui_onediff_guard.precision.policy import Precision

SMALL = SampleSettings(width=64, height=48, frames=9, steps=2, guidance_scale=6.0, seed=3, scheduler="DDIM")
STEP, LEARNED = GuardPolicy(scope=Scope.STEP), GuardPolicy(scope=Scope.LEARNED)
OFF = GuardPolicy(on_failure=OnFailure.OFF, scope=Scope.LEARNED)
BLOCKS = ("transformer_blocks.0", "transformer_blocks.1")
OUTSIDE = ("patch_embed", "time_embedding", "norm_final", "norm_out", "proj_out")


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
@pytest.mark.parametrize("fallback_blocks", [BLOCKS[:1], BLOCKS, OUTSIDE, (*OUTSIDE, *BLOCKS)], ids=len)
def test_no_fallback_blocks_make_the_result_worse(model_folder, fallback_blocks, precision, overflow, policy):
    """They are in fp32 in bf16. In fp16, where every layer is scaled, they are as the others."""
    folder = model_folder("5b", overflow)
    latents, report = sampled(folder, precision, policy, PrecisionOverrides(fp32_fallback_blocks=fallback_blocks))
    assert [(step.dtype, step.outcome) for step in report.steps] == [(precision, "finite")] * SMALL.steps
    without = unlearned(folder, precision)
    if precision == "fp16":
        assert report.protection and torch.equal(latents, without) and error(folder, latents) < 0.005
    else:
        assert not torch.equal(latents, without) and error(folder, latents) < 1.1 * error(folder, without)
    assert [note.startswith("from a profile: ") for note in report.notes if "profile" in note] == [True]


def test_where_nothing_is_learned_no_profile_is_read(model_folder):
    folder = model_folder("5b", "stream")
    latents, report = sampled(folder, "fp16", STEP, PrecisionOverrides(fp32_fallback_blocks=BLOCKS))
    assert not any("profile" in note for note in report.notes)
    assert report.learned is None and report.protection and error(folder, latents) < 0.005


@pytest.mark.parametrize(
    "fallback_block", ["transformer_blocks", "transformer_blocks.0.attn1", "", "transformer_blocks.9"]
)
def test_parts_that_no_run_would_name_are_refused(model_folder, fallback_block):
    _, report = sampled(model_folder("5b"), "fp16", LEARNED, PrecisionOverrides(fp32_fallback_blocks=(fallback_block,)))
    assert f"is left alone: this model has no part '{fallback_block}'" in str(report.notes)
