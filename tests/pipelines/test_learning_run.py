"""Learning through a whole sampling run: every layer scaled, kept for the next run."""

from __future__ import annotations

import gc
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.denoiser import guarded_denoiser
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load, profile_of
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides, read, write
from comfyui_onediff_guard.precision.policy import Component, Precision
from overflows import fails_in_half, fails_unscaled
from safetensors.torch import load_file, save_file

SMALL = SampleSettings(width=64, height=48, frames=9, steps=4, guidance_scale=6.0, seed=3, scheduler="DDIM")
LEARNED = GuardPolicy(scope=Scope.LEARNED)


@pytest.fixture
def unprotected(model_folder):
    """Stable Video Diffusion in fp16, whose time embedding leaves its range."""
    folder = model_folder("svd", "inside")
    options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
    return replace(load(folder, family_of(folder), precision=Precision.FP16, **options), policy=LEARNED)


def sampled(handle, policy, seed=3):
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    return sample(replace(handle, policy=policy), positive, negative, replace(SMALL, seed=seed))


def overflow_in_time_embedding(denoiser):
    """Between its two layers 1e5 and more; what it puts out fits."""
    embedding = denoiser.time_embedding
    with torch.no_grad():
        embedding.linear_1.weight.mul_(2.0**18)
        embedding.linear_2.weight.mul_(2.0**-14)


def overflow_between_parts(denoiser):
    """What the time embedding puts out reaches 1e6; what it is read by brings it back."""
    with torch.no_grad():
        denoiser.time_embedding.linear_1.weight.mul_(2.0**18)
        denoiser.time_embedding.linear_2.weight.mul_(2.0**4)
        for name, layer in denoiser.named_modules():
            if name.endswith((".norm1.linear", ".norm2.linear")) or name == "norm_out.linear":
                layer.weight.mul_(2.0**-18)


def video_from_a_picture(handle, seed):
    """Latents and report of Stable Video Diffusion."""
    picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(2))
    settings = SampleSettings(64, 64, steps=SMALL.steps, seed=seed, frames=2)
    start = fitted(picture, 64, 64, "crop")[0]
    return sample(handle, None, None, settings, image=start)


def small_call(config):
    return {
        "hidden_states": torch.zeros(1, 3, config.in_channels, 8, 8),
        "encoder_hidden_states": torch.zeros(1, config.max_text_seq_length, config.text_embed_dim),
        "timestep": torch.tensor([500]),
    }


def learned_by(report) -> Any:
    return report.learned


def first_rerun(report) -> Any:
    return report.steps[0].rerun


def error(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


PROTECTED = "overflow protection"


@pytest.mark.parametrize("overflow", ["stream", "inside", overflow_in_time_embedding, overflow_between_parts])
def test_no_overflow_costs_a_protected_denoiser_a_step_or_teaches_it_anything(model_folder, open_pipeline, overflow):
    gc.collect()  # the weights are changed below: no other test's
    handle = open_pipeline(model_folder("2b", overflow if isinstance(overflow, str) else "none"), "fp16")
    if callable(overflow):
        overflow(handle.store.module("transformer", "fp16"))
    latents, report = sampled(handle, LEARNED)
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")] * SMALL.steps
    assert report.protection == PROTECTED and learned_by(report) == NOTHING
    handle.store.learned[handle.memory_key("transformer", "fp16")] = PrecisionOverrides(whole_run_fp32=True)
    expected, in_fp32 = sampled(handle, LEARNED)
    assert {step.dtype for step in in_fp32.steps} == {"fp32"} and error(latents, expected) < 5e-3


def test_an_overflow_costs_a_denoiser_without_protection_one_rerun_and_no_more(unprotected, tmp_path):
    """In later processes neither. What a profile says that does not help is forgotten."""
    handle, store = replace(unprotected, profiles=tmp_path), unprotected.store
    useless = PrecisionOverrides(unquantised=("conv_in",))
    file = write(tmp_path, profile := replace(profile_of(handle, "unet", "fp16"), learned=useless))
    latents, report = video_from_a_picture(handle, 3)
    assert f"from a profile: {profile.in_words()}" in report.notes
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp32", "rerun"), *[("fp16", "finite")] * 3]
    assert learned_by(report) == replace(useless, all_layers_scaled=True)
    assert first_rerun(report).module == "time_embedding.linear_1"
    assert first_rerun(report).action == f"{PROTECTED} from here on" and report.protection == PROTECTED
    assert read(file) == replace(profile, learned=learned_by(report))
    store.learned.clear()
    _, again = video_from_a_picture(handle, 4)
    assert again.reruns == 0 and again.summary().count(PROTECTED) == 1
    _, every_step = video_from_a_picture(replace(unprotected, policy=GuardPolicy(scope=Scope.STEP)), 4)
    assert every_step.reruns == SMALL.steps, "where nothing may be learned, it is of no effect"
    assert latents.isfinite().all()


@pytest.mark.parametrize(
    ("precision", "fails", "learned", "dtypes", "reruns"),
    [
        ("fp16", fails_in_half, PrecisionOverrides(whole_run_fp32=True), ["fp32"] * 4, 1),
        ("bf16", fails_unscaled, PrecisionOverrides(all_layers_scaled=True), ["fp32", *["bf16"] * 3], 0),
    ],
)
def test_a_block_that_fails_again_and_again_is_given_up_after_one_rerun(
    model_folder, open_pipeline, precision, fails, learned, dtypes, reruns
):
    """In bf16 for good. A run in fp16 that goes on in fp32 is no lesson for the next one."""
    handle = open_pipeline(model_folder("2b"), precision)
    block = handle.store.module("transformer", precision).transformer_blocks[1]
    hook = block.ff.net[0].register_forward_hook(fails)
    latents, report = sampled(handle, LEARNED)
    _, again = sampled(handle, LEARNED, seed=4)
    hook.remove()
    assert [step.outcome for step in report.steps] == ["rerun", *["finite"] * 3]
    assert [step.dtype for step in report.steps] == dtypes and learned_by(report) == learned
    assert first_rerun(report).module.startswith("transformer_blocks.1.ff.net.0")
    assert report.protection == PROTECTED
    assert again.reruns == reruns
    expected, _ = sampled(handle, GuardPolicy(scope=Scope.STEP))
    assert error(latents, expected) < 5e-2


@pytest.mark.parametrize("then", ["gone", "gone, and stopped", "replaced", "its LoRA gone", "its LoRA replaced"])
def test_what_a_run_learned_is_of_the_weights_that_it_began_with(model_folder, open_pipeline, trained, tmp_path, then):
    """Its files may be gone by its end, or be another model's."""
    folder = shared_models.copied(model_folder("2b"), tmp_path / "model")
    model, lora = open_pipeline(folder).store.module("transformer", "fp32"), tmp_path / "a.safetensors"
    shutil.copy(trained(model), lora)
    loras = (Lora(lora),) if "LoRA" in then else ()
    opened = replace(open_pipeline(folder, "bf16"), policy=LEARNED, profiles=tmp_path / "kept", loras=loras)
    (positive, negative), _ = encode_prompts(opened, ["a red kite", ""])
    block = opened.store.module("transformer", "bf16").transformer_blocks[1]
    block.ff.net[0].register_forward_hook(fails_unscaled)
    name = profile_of(replace(open_pipeline(folder, "bf16"), loras=loras), "transformer", "bf16").name
    (weights,) = (folder / "transformer").glob("*.safetensors")

    def step_done(done, _total, _report):
        if done == 2 and loras:
            lora.unlink() if "gone" in then else shutil.copy(trained(model, seed=2), lora)
        elif done == 2 and then == "replaced":
            save_file({key: value * 1.5 for key, value in load_file(weights).items()}, tmp_path / "other")
            (tmp_path / "other").replace(weights)
        elif done == 2:
            shutil.rmtree(folder)
        elif done == 4 and then == "gone, and stopped":
            raise KeyboardInterrupt

    stopped = pytest.raises(KeyboardInterrupt) if then == "gone, and stopped" else nullcontext()
    with stopped:
        sample(opened, positive, negative, SMALL, step_done=step_done)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.stem == name and read(kept).learned == PrecisionOverrides(all_layers_scaled=True)


def test_what_did_not_help_is_not_kept_for_the_next_run(unprotected):
    hook = unprotected.store.module("unet", "fp16").conv_out.register_forward_hook(
        lambda *given: fails_in_half(*given) if given[2].dtype is torch.float32 else None  # with every layer scaled
    )
    _, report = video_from_a_picture(unprotected, 3)
    hook.remove()
    assert [step.dtype for step in report.steps] == ["fp32"] * SMALL.steps and report.reruns == 2
    assert learned_by(report) == PrecisionOverrides(whole_run_fp32=True)
    assert unprotected.store.learned[unprotected.memory_key("unet", "fp16")] == NOTHING


def test_a_denoiser_that_is_let_go_lets_go_of_the_model(model_folder, open_pipeline):
    handle = replace(open_pipeline(model_folder("2b"), "bf16"), policy=LEARNED)
    denoiser = guarded_denoiser(handle.stage(Component.DENOISER))
    with torch.no_grad():
        denoiser(**small_call(denoiser.config))
    store = weakref.ref(handle.store)
    gc.disable()
    try:
        del handle, denoiser
        assert store() is None, "no reference cycle holds the weights"
    finally:
        gc.enable()
