"""What a run learned, kept as a profile and used by a later process, or carried in a workflow."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides, read
from overflows import fails_unscaled

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")
LEARNED = GuardPolicy(scope=Scope.LEARNED)
BROKEN = "transformer_blocks.1"
SCALED = PrecisionOverrides(all_layers_scaled=True)


@pytest.fixture
def opened(model_folder, open_pipeline, tmp_path):
    """opened(policy) → a pipeline in bf16 as a new process would open it, with tmp_path/profiles for its memory.
    broken: a layer of one block is right in float32 alone."""
    hooks = []

    def fresh(policy=LEARNED, *, broken=True, **changes):
        gc.collect()
        handle = open_pipeline(model_folder("2b"), "bf16")
        handle.store.learned.clear()
        layer = handle.store.module("transformer", "bf16").get_submodule(BROKEN).ff.net[0]
        if broken and not layer._forward_hooks:
            hooks.append((handle.store, layer.register_forward_hook(fails_unscaled)))
        changes = {"architecture": arch.named("sm80"), "profiles": tmp_path / "profiles"} | changes
        return replace(handle, policy=policy, **changes)

    yield fresh
    for store, hook in hooks:
        hook.remove()
        store.learned.clear()


def sampled(handle, seed=3):
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    return sample(handle, positive, negative, replace(SMALL, seed=seed))


def kept(tmp_path):
    (file,) = (tmp_path / "profiles").glob("*.json")
    return file


def test_nothing_is_written_twice_nor_without_a_lesson(opened, tmp_path):
    sampled(opened(broken=False))
    assert not (tmp_path / "profiles").exists(), "nothing failed"
    sampled(opened())
    before = kept(tmp_path).stat().st_mtime_ns
    sampled(opened())
    assert kept(tmp_path).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 9}, "format is 9"),
        ({"format": 1, "learned": {"islands": ["transformer_blocks.1"]}}, "format is 1"),
        ({"versions": {"torch": "1.0"}}, "is left alone: it was made with torch 1.0"),
    ],
)
def test_a_kept_profile_that_does_not_fit_is_left_alone_with_a_line(opened, tmp_path, change, says):
    sampled(opened())
    file = kept(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    latents, report = sampled(opened())
    assert report.reruns == 1 and torch.isfinite(latents).all()
    assert any(says in note for note in report.notes), report.notes
    assert read(file).learned == report.learned == SCALED, "and is made anew"


def test_a_profile_that_a_workflow_carries(opened, tmp_path):
    sampled(opened())
    carried = read(kept(tmp_path))
    kept(tmp_path).unlink()
    _, report = sampled(opened(profile=carried))
    assert report.reruns == 0 and "from a profile" in report.text()
    assert not list((tmp_path / "profiles").iterdir()), "nothing was learned that the workflow does not carry"
    elsewhere = replace(carried, architecture="sm90")
    _, report = sampled(opened(profile=elsewhere))
    assert "the profile that was given is left alone: it is for sm90, and this is sm80" in report.notes
    assert report.reruns == 1
    assert read(kept(tmp_path)) == carried, "what a run learned itself is kept, the same or not"


def test_what_is_learned_on_top_of_a_profile_that_a_workflow_carries_is_kept(opened, tmp_path):
    sampled(opened())
    whole = read(kept(tmp_path))
    kept(tmp_path).unlink()
    other = PrecisionOverrides(unquantised=("transformer_blocks.0.ff.net.2",))
    _, report = sampled(opened(profile=replace(whole, learned=other)))
    both = replace(other, all_layers_scaled=True)
    assert report.reruns == 1 and read(kept(tmp_path)) == replace(whole, learned=both)
