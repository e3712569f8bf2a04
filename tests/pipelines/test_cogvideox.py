"""CogVideoX end to end on small folders: real diffusers, real from_pretrained, real tokenizer."""

from __future__ import annotations

import functools
import gc
import json
import logging
import weakref
from dataclasses import replace

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import placement
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, PlainPlacement
from comfyui_onediff_guard.precision.accumulation import SWITCHES
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped, OnFailure
from comfyui_onediff_guard.precision.policy import Precision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from overflows import fails_in_half
from tiers import drawn

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")
PROMPT = "a lighthouse above a calm sea"


def make(handle, sampling=SMALL, prompt=PROMPT, **decoding):
    (positive, negative), _ = encode_prompts(handle, [prompt, ""])
    latents, report = sample(handle, positive, negative, sampling)
    frames, _ = decode(handle, latents, **decoding)
    return frames, report


@functools.cache
def diffusers_pipeline(folder):
    pipe = diffusers.CogVideoXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def by_hand(folder, sampling, prompt=PROMPT, tiling=False):
    pipe = diffusers_pipeline(folder)
    scheduler = {"DPM": diffusers.CogVideoXDPMScheduler, "DDIM": diffusers.CogVideoXDDIMScheduler}[sampling.scheduler]
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    pipe.vae.enable_tiling() if tiling else pipe.vae.disable_tiling()
    video = pipe(
        prompt,
        negative_prompt="",
        width=sampling.width,
        height=sampling.height,
        num_frames=sampling.frames,
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance_scale,
        generator=torch.Generator().manual_seed(sampling.seed),
        output_type="pt",
    ).frames
    return video[0].permute(0, 2, 3, 1)[-sampling.frames :]  # of 5 frames diffusers makes 8


@pytest.mark.parametrize("variant", ["2b", "5b", "1.5"])
def test_fp32_is_bit_equal_to_diffusers_with_the_guard_installed(model_folder, open_pipeline, variant):
    folder = model_folder(variant)
    handle = open_pipeline(folder)
    assert handle.policy.on_failure is OnFailure.RERUN
    frames, report = make(handle)
    assert torch.equal(frames, by_hand(folder, SMALL))
    assert [step.outcome for step in report.steps] == ["finite"] * SMALL.steps


@pytest.fixture(scope="module")
def kept_open(model_folder):
    placement = PlainPlacement()
    options = {"precision": Precision.FP32, "backend": "eager", "offload": "none", "placement": placement}
    return load(model_folder("5b"), COGVIDEOX, **options)


@settings(max_examples=drawn(8, 2), suppress_health_check=list(HealthCheck))
@given(
    width=st.sampled_from([48, 64, 80]),
    height=st.sampled_from([48, 64]),
    frames=st.sampled_from([1, 5, 9, 13]),
    steps=st.integers(1, 3),
    scheduler=st.sampled_from(["DDIM", "DPM"]),
    guidance_scale=st.sampled_from([1.0, 6.0]),
    seed=st.integers(0, 2**32),
    tiling=st.booleans(),
)
def test_fp32_is_bit_equal_over_sizes_schedulers_and_guidance(model_folder, kept_open, tiling, **drawn):
    folder = model_folder("5b")
    sampling = SampleSettings(**drawn)
    frames, _ = make(kept_open, sampling, tiling=tiling)
    assert torch.equal(frames, by_hand(folder, sampling, tiling=tiling))


@pytest.mark.parametrize(
    ("variant", "overflow"), [("2b", "stream"), ("5b", "stream"), ("1.5", "stream"), ("5b", "inside")]
)
def test_what_leaves_fp16_is_black_in_plain_fp16_and_right_when_protected(
    model_folder, open_pipeline, variant, overflow
):
    folder = model_folder(variant, overflow)
    expected, _ = make(open_pipeline(folder, "fp32"))
    plain, plain_report = make(open_pipeline(folder, "fp16 (plain)"))
    assert torch.isnan(plain).all()
    assert plain_report.failed == SMALL.steps and plain_report.reruns == 0

    frames, report = make(open_pipeline(folder, "fp16"))
    assert torch.isfinite(frames).all()
    assert (frames - expected).abs().max() <= 2e-2
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")] * SMALL.steps
    assert f"; overflow protection; {SMALL.steps} steps, all fine" in report.summary()


@pytest.mark.parametrize("variant", ["2b", "5b"])
def test_protection_leaves_weights_as_they_are_and_nothing_for_a_later_run(model_folder, open_pipeline, variant):
    handle = open_pipeline(model_folder(variant), "fp16")
    first, report = make(handle)
    again, _ = make(handle)
    assert report.protection and torch.equal(first, again), "what is not compiled learns its scales in each run"
    denoiser = handle.store.module("transformer", "fp16")
    assert {weight.dtype for weight in denoiser.parameters()} == {torch.float16}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in denoiser.modules())


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16 (plain)"])
def test_what_has_the_range_and_plain_fp16_are_as_diffusers_computes_them(model_folder, open_pipeline, precision):
    _, report = make(open_pipeline(model_folder("5b"), precision))
    assert not report.protection and "float32" not in report.summary()


def test_fp32_is_bit_equal_after_a_protected_run(model_folder, open_pipeline):
    folder = model_folder("5b", "stream")
    handle = open_pipeline(folder, "fp16")
    _, report = make(handle)
    assert report.protection
    assert torch.equal(make(open_pipeline(folder, "fp32"))[0], by_hand(folder, SMALL))


def test_tiles_give_frames_of_the_same_size(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b"))
    sampling = replace(SMALL, width=128, height=80, steps=1)
    whole, _ = make(handle, sampling)
    tiled, _ = make(handle, sampling, tiling=True)
    assert tiled.shape == whole.shape == (9, 80, 128, 3)
    assert not torch.equal(tiled, whole), "it was tiled"
    assert (tiled - whole).abs().mean() < 0.1


def test_a_healthy_half_run_is_bit_equal_with_and_without_the_guard(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("5b"), "bf16")
    unguarded = replace(handle, policy=GuardPolicy(OnFailure.OFF))
    assert torch.equal(make(handle)[0], make(unguarded)[0])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_stop_policy_stops(model_folder, open_pipeline, precision):
    handle = replace(open_pipeline(model_folder("2b"), precision), policy=GuardPolicy(OnFailure.STOP))
    hook = handle.store.module("transformer", precision).proj_out.register_forward_hook(fails_in_half)
    with pytest.raises(GuardStopped, match="set to stop"):
        make(handle)
    frames, report = make(replace(handle, policy=GuardPolicy()))
    hook.remove()
    assert torch.isfinite(frames).all() and report.reruns


def test_another_seed_loads_encodes_and_compiles_nothing(model_folder, open_pipeline, caplog):
    handle = open_pipeline(model_folder("5b"))
    make(handle)
    with caplog.at_level(logging.INFO, "comfyui_onediff_guard"):
        make(handle, replace(SMALL, seed=4))
    assert caplog.messages == []


def test_a_prompt_used_before_is_remembered_and_a_new_one_loads_the_text_encoder_again(
    model_folder, open_pipeline, caplog
):
    def told():
        return [record.getMessage() for record in caplog.records if record.name.startswith("comfyui_onediff_guard")]

    handle = open_pipeline(model_folder("2b"))
    first, _ = encode_prompts(handle, ["one", ""])
    encode_prompts(handle, ["two", ""])
    with caplog.at_level(logging.INFO, "comfyui_onediff_guard"):
        again, report = encode_prompts(handle, ["one", ""])
        assert not told()
        encode_prompts(handle, ["three", ""])
    assert torch.equal(first[0], again[0])
    assert "nothing new to compute" in report.summary()
    assert len([line for line in told() if line.startswith("encoding prompt")]) == 1, "the empty one was known"


def test_a_new_prompt_reads_nothing_from_disk_where_main_memory_has_room(model_folder, open_pipeline, monkeypatch):
    handle, read = open_pipeline(model_folder("2b")), []
    original = type(handle.store)._load
    monkeypatch.setattr(type(handle.store), "_load", lambda store, *what: read.append(what) or original(store, *what))
    for prompt in ("one", "two"):
        (positive, negative), _ = encode_prompts(handle, [prompt, ""])
        sample(handle, positive, negative, SMALL)
    assert [name for name, _ in read] == ["text_encoder", "transformer"]


def test_the_text_encoder_is_let_go_before_the_denoiser_is_read_where_main_memory_has_no_room_for_both(
    model_folder, open_pipeline, monkeypatch
):
    handle = open_pipeline(model_folder("2b"))
    to_read = sum(handle.store.model.weights[name].n_bytes for name in ("transformer", "vae"))
    monkeypatch.setattr(placement, "main_memory", lambda: DeviceMemory(10 * to_read, 2 * to_read - 1))
    alive = []
    original = type(handle.store)._load

    def load(store, name, dtype):
        alive.append((name, [n for n, ref in references.items() if ref() is not None]))
        module = original(store, name, dtype)
        references[name] = weakref.ref(module)
        return module

    references: dict[str, weakref.ref] = {}
    monkeypatch.setattr(type(handle.store), "_load", load)
    make(handle)
    assert alive == [("text_encoder", []), ("transformer", []), ("vae", ["transformer"])]


def test_two_precisions_never_hold_two_copies(model_folder, open_pipeline):
    folder = model_folder("2b")
    handle = open_pipeline(folder, "fp32")
    make(handle)
    old = weakref.ref(handle.store.module("transformer", "fp32"))
    other = open_pipeline(folder, "bf16")
    assert other.store is handle.store
    make(other)
    gc.collect()
    assert old() is None
    assert other.store.loaded() == dict.fromkeys(["text_encoder", "transformer", "vae"], "bf16")


def test_everything_goes_with_the_last_handle(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b"))
    make(handle)
    references = [weakref.ref(handle.store), weakref.ref(handle.store.module("transformer", "fp32"))]
    del handle
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_offload_rests_components_in_host_memory(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b"), offload="model")
    rested = []
    handle.store.placement.to_host = lambda name, module: rested.append(name)  # type: ignore[method-assign]
    make(handle)
    assert rested == ["text_encoder", "transformer", "vae"]


def test_each_report_says_what_the_stage_took_of_memory(model_folder, open_pipeline):
    gc.collect()
    handle = open_pipeline(model_folder("2b"))
    _, encoding = encode_prompts(handle, ["a red kite"])
    *_, report = make(handle)
    weights = {
        name: sum(t.nbytes for t in {*module.parameters(), *module.buffers()})
        for name, module in ((name, handle.store.module(name, "fp32")) for name in ("text_encoder", "transformer"))
    }
    weights["transformer"] += weights["text_encoder"]  # which rests where a CPU computes
    for component, found in (("text_encoder", encoding), ("transformer", report)):
        if found.memory is None:
            pytest.skip("this system does not count")
        assert found.memory.weights == weights[component]
        assert found.memory.peak.used > found.memory.weights
        assert f"\nmemory: {found.memory}\n" in found.text()
        assert json.loads(json.dumps(found.as_dict()))["memory"]["peak"]["used"] == found.memory.peak.used


def test_t5_keeps_wo_in_fp32(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b"), "fp16")
    text_encoder = handle.store.module("text_encoder", "fp16")
    dtypes = {name.rsplit(".", 2)[-2]: p.dtype for name, p in text_encoder.named_parameters()}
    assert dtypes["wo"] == torch.float32
    assert dtypes["wi_0"] == torch.float16


def test_interrupt_leaves_nothing_behind_and_the_next_run_works(model_folder, open_pipeline):
    import os

    handle = open_pipeline(model_folder("5b", "stream"), "fp16")
    (positive, negative), _ = encode_prompts(handle, [PROMPT, ""])

    def interrupt(done, total, report):
        assert os.environ[SWITCHES[0]]
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(handle, positive, negative, SMALL, step_done=interrupt)
    assert not any(name in os.environ for name in SWITCHES)
    denoiser = handle.store.module("transformer", "fp16")
    assert "forward" not in vars(denoiser)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in denoiser.modules())
    seen = []
    sample(handle, positive, negative, SMALL, step_done=lambda done, total, report: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_precision_can_be_overridden_per_stage(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("5b"), "fp32")
    (positive, negative), _ = encode_prompts(handle, [PROMPT, ""], Precision.BF16)
    _, report = sample(handle, positive, negative, SMALL, request=Precision.BF16)
    assert report.plan.dtype == "bf16"
    assert {step.dtype for step in report.steps} == {"bf16"}
