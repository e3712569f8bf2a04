"""What a run learned, kept as a profile and used by a later process, or carried in a workflow."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import overflows
import pytest
import torch
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.profiles import profile_of
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides
from comfyui_onediff_guard.precision.profile_store import read, write

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")
LEARNED = GuardPolicy(scope=Scope.LEARNED)
SCALED = PrecisionOverrides(scaled_blocks=(overflows.OVERFLOWING_BLOCK,))
IN_FP32 = PrecisionOverrides(fp32_fallback_blocks=(overflows.OVERFLOWING_BLOCK,))


@pytest.fixture
def overflowing(model_folder):
    """A folder whose denoiser leaves fp16's range inside of one block."""
    return model_folder("2b", "inside")


@pytest.fixture
def opened(open_pipeline, tmp_path):
    """opened(folder, policy) → a pipeline as a new process would open it, with tmp_path/profiles for its memory."""

    stores = []

    def fresh(folder, policy=LEARNED, **changes):
        gc.collect()
        handle = open_pipeline(folder, "fp16")
        handle.store.learned.clear()
        stores.append(handle.store)
        changes = {"architecture": arch.named("sm75"), "profiles": tmp_path / "profiles"} | changes
        return replace(handle, policy=policy, **changes)

    yield fresh
    for store in stores:
        store.learned.clear()


def sampled(handle, seed=3):
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    return sample(handle, positive, negative, replace(SMALL, seed=seed))


def kept(tmp_path):
    (file,) = (tmp_path / "profiles").glob("*.json")
    return file


def test_scaled_blocks_are_kept_for_later_processes(overflowing, opened, tmp_path):
    expected, first = sampled(opened(overflowing))
    assert first.reruns == 1 and first.learned == SCALED
    profile = read(kept(tmp_path))
    assert profile.learned == SCALED and profile.model == overflowing.name
    latents, later = sampled(opened(overflowing))
    assert later.reruns == 0 and later.learned == SCALED
    assert f"from a profile: {profile.in_words()}" in later.notes
    assert (latents - expected).abs().max() / expected.abs().max() < 2e-2
    _, plain = sampled(opened(overflowing, GuardPolicy(scope=Scope.STEP)))
    assert plain.reruns == 3, "scope step learns nothing and uses nothing that was learned"
    assert not any("profile" in note for note in plain.notes)


def test_nothing_is_written_twice_nor_without_a_lesson(model_folder, overflowing, opened, tmp_path):
    sampled(opened(model_folder("2b")))
    sampled(opened(model_folder("5b", "stream")))
    assert not (tmp_path / "profiles").exists(), "nothing failed"
    sampled(opened(overflowing))
    before = kept(tmp_path).stat().st_mtime_ns
    sampled(opened(overflowing))
    assert kept(tmp_path).stat().st_mtime_ns == before


def test_a_run_that_is_interrupted_keeps_what_it_learned(overflowing, opened, tmp_path):
    handle = opened(overflowing)
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])

    def stop(done, _total, _report):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(handle, positive, negative, SMALL, step_done=stop)
    assert read(kept(tmp_path)).learned == SCALED


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 9}, "format is 9"),
        ({"format": 1, "learned": {"islands": ["transformer_blocks.1"]}}, "format is 1"),
        ({"versions": {"torch": "1.0"}}, "is left alone: it was made with torch 1.0"),
        ({"learned": {"fp32_fallback_blocks": ["blocks.7"]}}, "this model has no part 'blocks.7'"),
    ],
)
def test_a_kept_profile_that_does_not_fit_is_left_alone_with_a_line(overflowing, opened, tmp_path, change, says):
    sampled(opened(overflowing))
    file = kept(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    latents, report = sampled(opened(overflowing))
    assert report.reruns == 1 and torch.isfinite(latents).all()
    assert any(says in note for note in report.notes), report.notes
    assert read(file).learned == report.learned == SCALED, "and is made anew"


def test_a_kept_profile_is_used_for_its_fallback_blocks(overflowing, opened, tmp_path):
    sampled(opened(overflowing))
    file = kept(tmp_path)
    learned = {"fp32_fallback_blocks": [*IN_FP32.fp32_fallback_blocks]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"learned": learned}))
    _, report = sampled(opened(overflowing))
    assert report.reruns == 0 and report.learned == IN_FP32 and "from a profile" in report.text()


def test_a_profile_that_a_workflow_carries(overflowing, opened, tmp_path):
    sampled(opened(overflowing))
    carried = read(kept(tmp_path))
    kept(tmp_path).unlink()
    _, report = sampled(opened(overflowing, profile=carried))
    assert report.reruns == 0 and "from a profile" in report.text()
    assert not list((tmp_path / "profiles").iterdir()), "nothing was learned that the workflow does not carry"
    elsewhere = replace(carried, architecture="sm70")
    _, report = sampled(opened(overflowing, profile=elsewhere))
    assert "the profile that was given is left alone: it is for sm70, and this is sm75" in report.notes
    assert report.reruns == 1
    assert read(kept(tmp_path)) == carried, "what a run learned itself is kept, the same or not"


def test_what_is_learned_on_top_of_a_profile_that_a_workflow_carries_is_kept(overflowing, opened, tmp_path):
    sampled(opened(overflowing))
    whole = read(kept(tmp_path))
    kept(tmp_path).unlink()
    other = PrecisionOverrides(fp32_fallback_blocks=("transformer_blocks.0",))
    _, report = sampled(opened(overflowing, profile=replace(whole, learned=other)))
    both = replace(SCALED, fp32_fallback_blocks=other.fp32_fallback_blocks)
    assert report.reruns == 1 and read(kept(tmp_path)) == replace(whole, learned=both)


def test_a_disk_that_refuses_costs_no_run(overflowing, opened, tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file where a folder belongs")
    latents, report = sampled(opened(overflowing))
    assert torch.isfinite(latents).all() and report.reruns == 1
    assert "could not be kept" in caplog.text


def test_what_does_not_help_is_forgotten_for_later_processes_too(model_folder, opened, tmp_path):
    folder = model_folder("2b")
    handle = opened(folder)
    useless = replace(
        profile_of(handle, "transformer", "fp16"),
        learned=PrecisionOverrides(fp32_fallback_blocks=("transformer_blocks.1",)),
    )
    file = write(tmp_path / "profiles", useless)
    hook = handle.store.module("transformer", "fp16").proj_out.register_forward_hook(
        lambda _layer, _given, made: made * 1e9
    )
    _, report = sampled(handle)
    hook.remove()
    assert f"from a profile: {useless.in_words()}" in report.notes
    assert report.learned == PrecisionOverrides(all_layers_scaled=True), "its last layer puts out what does not fit"
    assert read(file) == replace(useless, learned=report.learned)
