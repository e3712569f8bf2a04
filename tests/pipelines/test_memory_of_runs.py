"""What a run learned, kept as a profile and used by a later process, or carried in a workflow."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines import profiles
from comfyui_onediff_guard.pipelines.encode import encode_prompts
from comfyui_onediff_guard.pipelines.memory import here
from comfyui_onediff_guard.pipelines.sample import SampleSettings, sample
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.learned import Learned

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")
LEARNED = GuardPolicy(scope=Scope.LEARNED)


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


def test_a_measured_stream_is_measured_once_for_all_processes(model_folder, opened, tmp_path):
    folder = model_folder("5b", "stream")  # sm75 folds it in every scope
    expected, first = sampled(opened(folder, GuardPolicy()))
    assert [step.dtype for step in first.steps] == ["fp32", "fp16", "fp16"]
    profile = profiles.read(kept(tmp_path))
    assert profile.learned.stream_peak == pytest.approx(first.stream_peak) and profile.model == folder.name
    latents, later = sampled(opened(folder, GuardPolicy()))
    assert [step.dtype for step in later.steps] == ["fp16"] * 3 and later.reruns == 0
    assert f"from a profile: {profile.in_words()}" in later.notes
    assert (latents - expected).abs().max() / expected.abs().max() < 2e-2


def test_islands_are_kept_for_later_processes(model_folder, opened, tmp_path):
    folder = model_folder("2b", "stream")
    _, first = sampled(opened(folder))
    assert first.reruns == 1
    _, later = sampled(opened(folder), seed=4)
    assert later.reruns == 0 and later.fold_bits == first.fold_bits
    _, plain = sampled(opened(folder, GuardPolicy()))
    assert plain.reruns == 3, "scope step learns nothing and uses nothing that was learned"


def test_nothing_is_written_twice_nor_without_a_lesson(model_folder, opened, tmp_path):
    sampled(opened(model_folder("2b")))
    assert not (tmp_path / "profiles").exists(), "nothing failed"
    folder = model_folder("2b", "stream")
    sampled(opened(folder))
    before = kept(tmp_path).stat().st_mtime_ns
    sampled(opened(folder))
    assert kept(tmp_path).stat().st_mtime_ns == before


def test_a_run_that_is_interrupted_keeps_what_it_learned(model_folder, opened, tmp_path):
    handle = opened(model_folder("2b", "stream"))
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])

    def stop(done, _total, _report):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(handle, positive, negative, SMALL, step_done=stop)
    assert (profiles.read(kept(tmp_path)).learned.stream_peak or 0) > 65504


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 9}, "format is 9"),
        ({"versions": {"torch": "1.0"}}, "is left alone: it was made with torch 1.0"),
        ({"learned": {"stream_peak": None, "islands": ["blocks.7"]}}, "this model has no part 'blocks.7'"),
    ],
)
def test_a_kept_profile_that_does_not_fit_is_left_alone_with_a_line(model_folder, opened, tmp_path, change, says):
    folder = model_folder("2b", "stream")
    sampled(opened(folder))
    file = kept(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    latents, report = sampled(opened(folder))
    assert report.reruns == 1 and torch.isfinite(latents).all()
    assert any(says in note for note in report.notes), report.notes
    assert profiles.read(file).learned == report.learned != Learned(), "and is made anew"


def test_a_profile_that_a_workflow_carries(model_folder, opened, tmp_path):
    folder = model_folder("2b", "stream")
    sampled(opened(folder))
    carried = profiles.read(kept(tmp_path))
    kept(tmp_path).unlink()
    _, report = sampled(opened(folder, profile=carried))
    assert report.reruns == 0 and "from a profile" in report.text()
    assert not list((tmp_path / "profiles").iterdir()), "nothing was learned that the workflow does not carry"
    elsewhere = replace(carried, architecture="sm70")
    _, report = sampled(opened(folder, profile=elsewhere))
    assert "the profile that was given is left alone: it is for sm70, and this is sm75" in report.notes
    assert report.reruns == 1
    assert profiles.read(kept(tmp_path)) == carried, "what a run learned itself is kept, the same or not"


def test_what_is_learned_on_top_of_a_profile_that_a_workflow_carries_is_kept(model_folder, opened, tmp_path):
    folder = model_folder("2b", "stream")
    sampled(opened(folder))
    whole = profiles.read(kept(tmp_path))
    kept(tmp_path).unlink()
    _, report = sampled(opened(folder, profile=replace(whole, learned=Learned(1.0))))
    assert report.reruns == 1 and profiles.read(kept(tmp_path)) == whole


def test_a_disk_that_refuses_costs_no_run(model_folder, opened, tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file where a folder belongs")
    latents, report = sampled(opened(model_folder("2b", "stream")))
    assert torch.isfinite(latents).all() and report.reruns == 1
    assert "could not be kept" in caplog.text


def test_islands_that_do_not_help_are_forgotten_for_later_processes_too(model_folder, opened, tmp_path):
    folder = model_folder("2b")
    handle = opened(folder)
    useless = replace(here(handle, "fp16"), learned=Learned(islands=("transformer_blocks.1",)))
    file = profiles.write(tmp_path / "profiles", useless)
    hook = handle.store.denoiser("fp16").proj_out.register_forward_hook(lambda _layer, _given, made: made * 1e9)
    _, report = sampled(handle)
    hook.remove()
    assert f"from a profile: {useless.in_words()}" in report.notes
    assert report.learned == Learned(whole_run_fp32=True)
    assert profiles.read(file) == replace(useless, learned=Learned())
