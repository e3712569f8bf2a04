"""CogVideoX end to end on small folders: real diffusers, real from_pretrained, real tokenizer."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import placement
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped, OnFailure
from overflows import fails_in_half
from small_runs import opened
from test_families import by_hand, make

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")


@pytest.mark.parametrize("variant", ["2b", "5b", "1.5"])
def test_guarded_fp32_run_is_bit_equal_to_diffusers(variant):
    handle = opened(variant)
    assert handle.policy.on_failure is OnFailure.RERUN
    frames, report = make(handle, SMALL)
    assert torch.equal(frames, by_hand(handle, SMALL, loaded=False, num_frames=SMALL.frames))
    assert [step.outcome for step in report.steps] == ["finite"] * SMALL.steps


@pytest.mark.parametrize(
    ("variant", "overflow"), [("2b", "stream"), ("5b", "stream"), ("1.5", "stream"), ("5b", "inside")]
)
def test_protected_fp16_is_near_fp32_where_plain_fp16_is_nan(variant, overflow):
    def made_in(precision):
        return make(opened(variant, precision=precision, overflow=overflow), SMALL)

    expected, exact_report = made_in("fp32")
    plain, plain_report = made_in("fp16 (plain)")
    assert torch.isnan(plain).all() and not exact_report.protection and not plain_report.protection
    assert plain_report.failed == SMALL.steps and plain_report.reruns == 0
    frames, report = made_in("fp16")
    assert torch.isfinite(frames).all()
    assert (frames - expected).abs().max() <= 2e-2
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")] * SMALL.steps
    assert f"; overflow protection; {SMALL.steps} steps, all fine" in report.summary()
    assert torch.equal(made_in("fp32")[0], expected), "later runs are unchanged"


def test_tiled_decode_has_same_size_and_is_near_whole_one():
    handle = opened("2b")
    sampling = replace(SMALL, width=128, height=80, steps=1)
    whole, _ = make(handle, sampling)
    tiled, _ = make(handle, sampling, tiling=True)
    assert tiled.shape == whole.shape == (9, 80, 128, 3)
    assert not torch.equal(tiled, whole), "it was tiled"
    assert (tiled - whole).abs().mean() < 0.1


def test_healthy_bf16_run_is_bit_equal_with_and_without_guard():
    handle = opened("5b", precision="bf16")
    unguarded = replace(handle, policy=GuardPolicy(OnFailure.OFF))
    assert torch.equal(make(handle, SMALL)[0], make(unguarded, SMALL)[0])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_stop_policy_stops(precision):
    handle = replace(opened("2b", precision=precision), policy=GuardPolicy(OnFailure.STOP))
    hook = handle.store.module("transformer", precision).proj_out.register_forward_hook(fails_in_half)
    with pytest.raises(GuardStopped, match="set to 'stop'"):
        make(handle, SMALL)
    frames, report = make(replace(handle, policy=GuardPolicy()), SMALL)
    hook.remove()
    assert torch.isfinite(frames).all() and report.reruns


def test_new_prompt_and_seed_read_nothing_if_ram_has_room(monkeypatch):
    handle, read = opened("2b"), []
    original = type(handle.store)._load
    monkeypatch.setattr(type(handle.store), "_load", lambda store, *what: read.append(what) or original(store, *what))
    for seed, prompt in enumerate(("one", "two")):
        (positive, negative), _ = encode_prompts(handle, [prompt, ""])
        sample(handle, positive, negative, replace(SMALL, seed=seed))
    assert [name for name, _ in read] == ["text_encoder", "transformer"]


def test_text_encoder_is_freed_before_denoiser_is_read_if_ram_is_short(
    monkeypatch,
):
    handle = opened("2b")
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
    make(handle, SMALL)
    assert alive == [("text_encoder", []), ("transformer", []), ("vae", ["transformer"])]


def test_deleting_last_handle_frees_all_weights():
    handle = opened("2b")
    make(handle, SMALL)
    references = [weakref.ref(handle.store), weakref.ref(handle.store.module("transformer", "fp32"))]
    del handle
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_each_report_states_memory_of_its_stage():
    gc.collect()
    handle = opened("2b")
    _, encoding = encode_prompts(handle, ["a red kite"])
    *_, report = make(handle, SMALL)
    weights = {
        name: sum(t.nbytes for t in {*module.parameters(), *module.buffers()})
        for name, module in ((name, handle.store.module(name, "fp32")) for name in ("text_encoder", "transformer"))
    }
    weights["transformer"] += weights["text_encoder"]  # which stays loaded on a CPU
    for component, found in (("text_encoder", encoding), ("transformer", report)):
        if found.memory is None:
            pytest.skip("this system does not count")
        assert found.memory.weights == weights[component]
        assert found.memory.peak.used > found.memory.weights
        assert f"\nmemory: {found.memory}\n" in found.text()
        assert json.loads(json.dumps(found.as_dict()))["memory"]["peak"]["used"] == found.memory.peak.used
