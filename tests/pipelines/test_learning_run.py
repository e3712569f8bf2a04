"""Learning through a whole sampling run: fold and islands under compile, and kept for the next run."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.denoiser import guarded_denoiser
from comfyui_onediff_guard.pipelines.encode import encode_prompts
from comfyui_onediff_guard.pipelines.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.policy import Component
from torch._dynamo.utils import counters

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
    denoiser = handle.store.denoiser("fp16")
    with torch.no_grad():
        feed_forward = denoiser.transformer_blocks[block].ff
        feed_forward.net[0].proj.weight.mul_(2.0**17)
        feed_forward.net[2].weight.mul_(2.0**-17)


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


def test_a_failing_stream_leads_to_a_fold_and_zero_further_reruns(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b", "stream"), "fp16")
    expected, every_step = sampled(handle, GuardPolicy())
    assert every_step.reruns == SMALL.steps and every_step.fold_bits is None, "the default learns nothing"
    latents, report = sampled(handle, LEARNED)
    assert [step.outcome for step in report.steps] == ["rerun", "finite", "finite", "finite"]
    assert report.fold_bits and learned_by(report).islands == () and error(latents, expected) < 2e-2
    _, again = sampled(handle, LEARNED, seed=4)
    assert again.reruns == 0, "kept for the next run"
    assert sampled(handle, GuardPolicy())[1].reruns == SMALL.steps, "and of no effect where nothing may be learned"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_inner_overflow_leads_to_one_island_and_no_new_graph(model_folder, open_pipeline, backend):
    gc.collect()  # the weights are changed below: no other test's
    handle = open_pipeline(model_folder("2b"), "fp16", backend=backend)
    overflow_inside(handle, 1)
    before = counters["stats"]["unique_graphs"]
    latents, report = sampled(handle, LEARNED)
    assert [step.outcome for step in report.steps] == ["rerun", "finite", "finite", "finite"]
    assert learned_by(report).islands == ("transformer_blocks.1",)
    assert first_rerun(report).module.startswith("transformer_blocks.1.ff.net.0")
    assert "'transformer_blocks.1' in fp32; 4 steps, 1 rerun" in report.summary()
    _, again = sampled(handle, LEARNED, seed=4)
    assert again.reruns == 0
    assert counters["stats"]["unique_graphs"] - before == (backend == "inductor")
    expected, _ = sampled(handle, GuardPolicy())
    assert error(latents, expected) < 2e-2


def test_a_denoiser_that_is_let_go_lets_go_of_the_model(model_folder, open_pipeline):
    handle = replace(open_pipeline(model_folder("2b"), "bf16"), policy=LEARNED)
    denoiser = guarded_denoiser(handle, handle.report(handle.plan(Component.DENOISER)))
    with torch.no_grad():
        denoiser(**small_call(denoiser.config))
    store = weakref.ref(handle.store)
    gc.disable()
    try:
        del handle, denoiser
        assert store() is None, "no reference cycle holds the weights"
    finally:
        gc.enable()
