"""Precision overrides learned in a whole sampling run: all layers scaled, and saved for the next run."""

from __future__ import annotations

import gc
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.denoiser import guarded_denoiser
from comfyui_onediff_guard.pipelines.run.handle import profile_of
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides, read, write
from comfyui_onediff_guard.precision.policy import Component
from overflows import fails_unscaled
from safetensors.torch import load_file, save_file
from small_runs import SMALL, error, opened, prompts, sampled

STEPS = 4
LEARNED = GuardPolicy(scope=Scope.LEARNED)
PROTECTED = "overflow protection"


def run(handle, policy=LEARNED, **more):
    """Latents and report, in STEPS steps."""
    size = (64, 64, 2) if handle.family.takes_image else SMALL
    return sampled(replace(handle, policy=policy), size, steps=STEPS, **more)


def overflow_in_time_embedding(denoiser):
    """Values between its two layers reach 1e5 and more; its output fits fp16."""
    embedding = denoiser.time_embedding
    with torch.no_grad():
        embedding.linear_1.weight.mul_(2.0**18)
        embedding.linear_2.weight.mul_(2.0**-14)


def overflow_between_parts(denoiser):
    """The output of the time embedding reaches 1e6; the layers that read it scale it back."""
    with torch.no_grad():
        denoiser.time_embedding.linear_1.weight.mul_(2.0**18)
        denoiser.time_embedding.linear_2.weight.mul_(2.0**4)
        for name, layer in denoiser.named_modules():
            if name.endswith((".norm1.linear", ".norm2.linear")) or name == "norm_out.linear":
                layer.weight.mul_(2.0**-18)


@pytest.mark.parametrize("overflow", [overflow_in_time_embedding, overflow_between_parts])
def test_protected_denoiser_needs_no_rerun_and_learns_nothing(overflow):
    """tests/pipelines/test_cogvideox.py has overflows in blocks."""
    gc.collect()  # the weights are changed below: no other test's
    handle = opened("2b", precision="fp16")
    overflow(handle.store.module("transformer", "fp16"))
    latents, report = run(handle)
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")] * STEPS
    assert report.protection == PROTECTED and report.learned == NOTHING
    handle.store.learned[handle.memory_key("transformer", "fp16")] = PrecisionOverrides(whole_run_fp32=True)
    expected, in_fp32 = run(handle)
    assert {step.dtype for step in in_fp32.steps} == {"fp32"} and error(latents, expected) < 3e-3


def test_unprotected_denoiser_is_rerun_once_and_then_protected(tmp_path):
    """Also in later processes. Overrides of the profile stay, even if they do not help."""
    handle = opened("svd", precision="fp16", overflow="inside", profiles=tmp_path)
    useless = PrecisionOverrides(unquantised=("conv_in",))
    file = write(tmp_path, profile := replace(profile_of(handle, "unet", "fp16"), learned=useless))
    latents, report = run(handle)
    assert f"from a profile: {profile.in_words()}" in report.notes
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp32", "rerun"), *[("fp16", "finite")] * 3]
    assert report.learned == replace(useless, all_layers_scaled=True)
    rerun = report.steps[0].rerun
    assert (rerun.module, rerun.action) == ("time_embedding.linear_1", f"{PROTECTED} from here on")
    assert report.protection == PROTECTED and read(file) == replace(profile, learned=report.learned)
    handle.store.learned.clear()
    _, again = run(handle, seed=4)
    assert again.reruns == 0 and again.summary().count(PROTECTED) == 1
    _, every_step = run(handle, GuardPolicy(scope=Scope.STEP), seed=4)
    assert every_step.reruns == STEPS, "scope 'step' ignores overrides"
    assert latents.isfinite().all()


@pytest.mark.parametrize("change", ["gone", "gone, and stopped", "replaced", "its LoRA gone", "its LoRA replaced"])
def test_overrides_are_saved_for_weights_at_start_of_run(copy, trained, tmp_path, change):
    """By its end, its files may be deleted, or be another model's."""
    folder = copy("2b")
    model, lora = opened(folder).store.module("transformer", "fp32"), tmp_path / "a.safetensors"
    shutil.copy(trained(model), lora)
    loras = (Lora(lora),) if "LoRA" in change else ()
    handle = replace(opened(folder, precision="bf16", profiles=tmp_path / "kept"), loras=loras)
    prompts(handle)
    block = handle.store.module("transformer", "bf16").transformer_blocks[1]
    block.ff.net[0].register_forward_hook(fails_unscaled)
    name = profile_of(handle, "transformer", "bf16").name
    (weights,) = (folder / "transformer").glob("*.safetensors")

    def step_done(done, _total, _report):
        if done == 2 and loras:
            lora.unlink() if "gone" in change else shutil.copy(trained(model, seed=2), lora)
        elif done == 2 and change == "replaced":
            save_file({key: value * 1.5 for key, value in load_file(weights).items()}, tmp_path / "other")
            (tmp_path / "other").replace(weights)
        elif done == 2:
            shutil.rmtree(folder)
        elif done == 4 and change == "gone, and stopped":
            raise KeyboardInterrupt

    stopped = pytest.raises(KeyboardInterrupt) if change == "gone, and stopped" else nullcontext()
    with stopped:
        run(handle, step_done=step_done)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.stem == name and read(kept).learned == PrecisionOverrides(all_layers_scaled=True)


def test_deleting_guarded_denoiser_frees_model():
    handle = replace(opened("2b", precision="bf16"), policy=LEARNED)
    denoiser = guarded_denoiser(handle.stage(Component.DENOISER))
    inputs = handle.family.step_inputs(denoiser.config, (1, 16, 3, 8, 8), {})
    with torch.no_grad():
        denoiser(**{name: torch.zeros_like(tensor, device="cpu") for name, tensor in inputs.items()})
    store = weakref.ref(handle.store)
    gc.disable()
    try:
        del handle, denoiser
        assert store() is None, "no reference cycle holds the weights"
    finally:
        gc.enable()
