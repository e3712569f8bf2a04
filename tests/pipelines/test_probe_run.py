"""The probe's recommendation, applied: no step fails any more."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.insight.probe import keep_profile, probe
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import ALL_LAYERS_SCALED, PrecisionOverrides, parse
from comfyui_onediff_guard.precision.policy import Precision

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")
LEARNED = GuardPolicy(scope=Scope.LEARNED)

PROTECTED = f"fp16 with {ALL_LAYERS_SCALED}"


@pytest.fixture
def opened(open_pipeline):
    def fresh(folder, card="sm75", precision="auto"):
        gc.collect()
        handle = open_pipeline(folder, precision)
        handle.store.learned.clear()
        return replace(handle, architecture=arch.named(card))

    return fresh


def prompts(handle):
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    return positive, negative


def hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.mark.parametrize(
    ("variant", "overflow", "card", "precision", "plan"),
    [
        ("2b", "stream", "sm75", "fp16", PROTECTED),
        ("5b", "inside", "sm75", "fp16", PROTECTED),
        ("1.5", "stream", "sm75", "fp16", PROTECTED),
        ("5b", "stream", "sm80", "auto", "bf16"),
        ("2b", "stream", "sm75", "fp32", "fp32"),
    ],
    ids=["2b", "5b", "1.5", "a card with bf16", "stored in fp32"],
)
def test_applied_it_leads_to_no_rerun(model_folder, opened, variant, overflow, card, precision, plan):
    handle = opened(model_folder(variant, overflow), card, precision)
    found = probe(handle, *prompts(handle), SMALL)
    assert found.chosen.plan == plan
    assert PROTECTED in [verdict.plan for verdict in found.verdicts]
    assert found.to_apply == ("set precision to 'bf16'" if "bf16" in plan and plan != found.plan.dtype else "")
    assert bool(found.profile_text) is (plan != "fp32")
    profile = parse(found.profile_text, "it") if found.profile_text else None
    applied = replace(handle, policy=LEARNED, profile=profile)
    latents, report = sample(applied, *prompts(applied), SMALL)
    assert [(step.dtype, step.outcome) for step in report.steps] == [(found.chosen.dtype, "finite")] * SMALL.steps
    assert torch.isfinite(latents).all() and bool(report.protection) is (found.chosen.dtype == "fp16")


def test_every_step_is_measured_and_the_cost_is_stated(model_folder, opened):
    handle = opened(model_folder("2b", "stream"))
    denoiser = handle.store.module("transformer", "fp16")
    found = probe(handle, *prompts(handle), SMALL)
    assert len(found.probed.steps) == SMALL.steps
    assert found.seconds > 0 and f"3 steps in {found.seconds:.3g} s" in found.text()
    assert hooks(denoiser) == 0
    blocks = len(denoiser.transformer_blocks)
    assert {f"transformer_blocks.{i}" for i in range(blocks)} <= set(found.probed.steps[0])


def test_an_interrupt_ends_it_and_leaves_nothing_behind(model_folder, opened):
    handle = opened(model_folder("2b", "stream"))
    denoiser = handle.store.module("transformer", "fp16")
    before = dict(denoiser.__dict__)

    def stop(done, _total, _report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(handle, *prompts(handle), SMALL, step_done=stop)
    assert hooks(denoiser) == 0 and denoiser.__dict__ == before
    assert torch.overrides._get_current_function_mode_stack() == []
    assert handle.store.learned == {}, "nothing is learned by measuring"


def test_the_same_steps_without_it_see_nothing_of_it(model_folder, opened):
    handle = opened(model_folder("2b"), precision="bf16")
    expected, _ = sample(handle, *prompts(handle), SMALL)
    probe(handle, *prompts(handle), SMALL)
    latents, _ = sample(handle, *prompts(handle), SMALL)
    assert torch.equal(latents, expected)


def test_it_is_kept_where_that_is_asked_for(model_folder, opened, tmp_path):
    folder = model_folder("svd", "inside")
    options = {"backend": "eager", "offload": "none", "placement": PlainPlacement(), "profiles": tmp_path / "profiles"}
    handle = load(folder, family_of(folder), precision=Precision.FP16, **options)
    handle = replace(handle, architecture=arch.named("sm75"))
    settings = SampleSettings(64, 64, steps=2, seed=3, frames=2)
    image = fitted(torch.ones(1, 64, 64, 3), 64, 64, "crop")[0]
    found = probe(handle, None, None, settings, image=image)
    assert not (tmp_path / "profiles").exists() and found.chosen.plan == PROTECTED
    assert found.to_apply == "wire `profile` into the NaN Guard's `profile`, and set its scope to 'learned'"
    assert found.profile and found.profile.name in keep_profile(handle, found)
    assert (tmp_path / "profiles" / f"{found.profile.name}.json").read_text() == found.profile_text
    assert found.profile.learned == PrecisionOverrides(all_layers_scaled=True)
    _, report = sample(replace(handle, policy=LEARNED), None, None, settings, image=image)
    assert report.reruns == 0, "in this process too"
    for variant, overflow, card in (("5b", "stream", "sm80"), ("2b", "inside", "sm75")):
        other = opened(model_folder(variant, overflow), card)
        assert keep_profile(other, probe(other, *prompts(other), SMALL)).startswith("nothing to keep")
