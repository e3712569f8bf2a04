"""Learning through a whole sampling run: scaled blocks and fallback blocks under compile, and kept for the next run."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.denoiser import guarded_denoiser
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from torch._dynamo.utils import counters
from torch.overrides import _get_current_function_mode_stack

SMALL = SampleSettings(width=64, height=48, frames=9, steps=4, guidance_scale=6.0, seed=3, scheduler="DDIM")
LEARNED = GuardPolicy(scope=Scope.LEARNED)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Graphs of one test would be found by another, which counts them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sampled(handle, policy, seed=3):
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    return sample(replace(handle, policy=policy), positive, negative, replace(SMALL, seed=seed))


def overflow_inside(handle, block):
    """Hidden activations of one feed-forward reach 1e5 and more; what it writes to the stream stays as it was."""
    denoiser = handle.store.module("transformer", "fp16")
    with torch.no_grad():
        feed_forward = denoiser.transformer_blocks[block].ff
        feed_forward.net[0].proj.weight.mul_(2.0**17)
        feed_forward.net[2].weight.mul_(2.0**-17)


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
    return sample(replace(handle, policy=LEARNED), None, None, settings, image=start)


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


def test_a_stream_beyond_fp16_teaches_nothing(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b", "stream"), "fp16")
    _, report = sampled(handle, LEARNED)
    assert [step.outcome for step in report.steps] == ["finite"] * SMALL.steps
    assert report.protection and learned_by(report) == PrecisionOverrides()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_inner_overflow_scales_one_block_and_no_new_graph(model_folder, open_pipeline, backend):
    gc.collect()  # the weights are changed below: no other test's
    handle = open_pipeline(model_folder("2b"), "fp16", backend=backend)
    overflow_inside(handle, 1)
    before = counters["stats"]["unique_graphs"]
    latents, report = sampled(handle, LEARNED)
    assert [step.outcome for step in report.steps] == ["rerun", "finite", "finite", "finite"]
    assert learned_by(report) == PrecisionOverrides(scaled_blocks=("transformer_blocks.1",))
    assert first_rerun(report).module.startswith("transformer_blocks.1.ff.net.0")
    assert "'transformer_blocks.1' protected; 4 steps, 1 recomputed in fp32" in report.summary()
    _, again = sampled(handle, LEARNED, seed=4)
    assert again.reruns == 0
    assert counters["stats"]["unique_graphs"] - before == (backend == "inductor")
    expected, every_step = sampled(handle, GuardPolicy(scope=Scope.STEP))
    assert every_step.reruns == SMALL.steps, "where nothing may be learned, it is of no effect"
    assert error(latents, expected) < 2e-2


@pytest.mark.parametrize("model", ["2b", "svd"])
def test_an_overflow_outside_of_the_blocks_costs_one_rerun_and_no_more(model_folder, model):
    gc.collect()  # the weights are changed below: no other test's
    folder = model_folder(model)
    options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
    handle = load(folder, family_of(folder), precision=Precision.FP16, **options)
    overflow_in_time_embedding(handle.store.module(handle.family.denoiser, "fp16"))
    run = (
        (lambda seed: sampled(handle, LEARNED, seed))
        if model == "2b"
        else (lambda seed: video_from_a_picture(handle, seed))
    )
    _, report = run(3)
    assert [step.outcome for step in report.steps] == ["rerun", "finite", "finite", "finite"]
    assert {step.dtype for step in report.steps[1:]} == {"fp16"}
    assert learned_by(report) == PrecisionOverrides(scaled_blocks=("time_embedding",))
    assert first_rerun(report).module == "time_embedding.linear_1"
    assert "inside a block" not in report.steps[0].note
    assert run(4)[1].reruns == 0, "kept for the next run"


def fails_scaled(_layer, _given, made):
    """As a hook: what the layer puts out is right in fp32 alone."""
    is_scaled = any(isinstance(mode, ScaledHalfMatmulMode) for mode in _get_current_function_mode_stack())
    return made * math.inf if is_scaled or made.dtype != torch.float32 else None


@pytest.mark.parametrize(("precision", "reruns"), [("fp16", 2), ("bf16", 1)])
def test_a_block_that_fails_even_when_scaled_becomes_a_fallback_block(model_folder, open_pipeline, precision, reruns):
    handle = open_pipeline(model_folder("2b"), precision)
    block = handle.store.module("transformer", precision).transformer_blocks[1]
    hook = block.ff.net[0].register_forward_hook(fails_scaled)
    latents, report = sampled(handle, LEARNED)
    _, again = sampled(handle, LEARNED, seed=4)
    hook.remove()
    assert [step.outcome for step in report.steps] == ["rerun"] * reruns + ["finite"] * (SMALL.steps - reruns)
    assert learned_by(report) == PrecisionOverrides(fp32_fallback_blocks=("transformer_blocks.1",))
    assert (
        report.summary().count("'transformer_blocks.1' in fp32; 4 steps") == 1 and "protected" not in report.summary()
    )
    assert again.reruns == 0, "kept for the next run"
    expected, _ = sampled(handle, GuardPolicy(scope=Scope.STEP))
    assert error(latents, expected) < 5e-2


def test_what_cannot_be_scaled_in_blocks_is_scaled_in_all(model_folder, open_pipeline):
    gc.collect()  # the weights are changed below: no other test's
    handle = open_pipeline(model_folder("2b"), "fp16")
    overflow_between_parts(handle.store.module("transformer", "fp16"))
    latents, report = sampled(handle, LEARNED)
    _, again = sampled(handle, LEARNED, seed=4)
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp32", "rerun"), *[("fp16", "finite")] * 3]
    assert first_rerun(report).action == "overflow protection in every layer from here on"
    assert (
        learned_by(report) == PrecisionOverrides(all_layers_scaled=True)
        and report.protection == "overflow protection in every layer"
    )
    assert again.reruns == 0 and again.summary().count("overflow protection in every layer") == 1
    expected, _ = sampled(handle, GuardPolicy(scope=Scope.STEP))
    assert error(latents, expected) < 2e-2


def test_what_is_scaled_in_all_is_not_compiled_and_the_report_says_so(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b"), "fp16", backend="inductor")
    key = handle.memory_key("transformer", "fp16")
    handle.store.learned[key] = PrecisionOverrides(all_layers_scaled=True)
    before = counters["stats"]["unique_graphs"]
    _, report = sampled(handle, LEARNED)
    assert (report.backend, report.backend_reason) == (
        "eager",
        "nothing is compiled with overflow protection in every layer",
    )
    assert counters["stats"]["unique_graphs"] == before
    handle.store.learned[key] = PrecisionOverrides()
    _, report = sampled(handle, LEARNED)
    assert report.backend == "inductor" and counters["stats"]["unique_graphs"] == before + 1


def test_what_did_not_help_is_not_kept_for_the_next_run(model_folder, open_pipeline):
    gc.collect()
    handle = open_pipeline(model_folder("2b"), "fp16")
    overflow_inside(handle, 1)
    denoiser = handle.store.module("transformer", "fp16")
    calls = iter(range(10**6))

    def fails(layer, given, made):
        return fails_scaled(layer, given, made) if next(calls) > 1 else made  # from the second step on

    hook = denoiser.proj_out.register_forward_hook(fails)
    _, report = sampled(handle, LEARNED)
    hook.remove()
    assert [step.dtype for step in report.steps] == ["fp32"] * SMALL.steps and report.reruns == 3
    assert learned_by(report) == PrecisionOverrides(whole_run_fp32=True)
    assert handle.store.learned[handle.memory_key("transformer", "fp16")] == PrecisionOverrides()


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
