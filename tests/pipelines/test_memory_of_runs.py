"""Precision overrides of a run: saved as a profile and used by a later process, or carried in a workflow."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.denoiser import PROFILE_UNUSED
from comfyui_onediff_guard.pipelines.run.handle import profile_of
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure, Scope
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides, read
from comfyui_onediff_guard.precision.policy import Precision
from overflows import fails_unscaled
from small_runs import SMALL, error, sampled
from small_runs import opened as open_pipeline

STEP, LEARNED = GuardPolicy(scope=Scope.STEP), GuardPolicy(scope=Scope.LEARNED)
OFF = GuardPolicy(on_failure=OnFailure.OFF, scope=Scope.LEARNED)
BROKEN = "transformer_blocks.1"
SCALED = PrecisionOverrides(all_layers_scaled=True)


@pytest.fixture
def opened(tmp_path):
    """opened(policy) → a pipeline in bf16 as a new process would open it, with its profiles in tmp_path/profiles.
    broken: a layer of one block works only in float32."""
    hooks = []

    def fresh(policy=LEARNED, *, broken=True, **changes):
        gc.collect()
        handle = open_pipeline("2b", precision="bf16")
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


def saved_profile(tmp_path):
    (file,) = (tmp_path / "profiles").glob("*.json")
    return file


def test_profile_is_written_only_if_overrides_are_new(opened, tmp_path):
    sampled(opened(broken=False), SMALL)
    assert not (tmp_path / "profiles").exists(), "nothing failed"
    sampled(opened(), SMALL)
    before = saved_profile(tmp_path).stat().st_mtime_ns
    sampled(opened(), SMALL)
    assert saved_profile(tmp_path).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "format is 2"),
        ({"format": 1, "learned": {"islands": ["transformer_blocks.1"]}}, "format is 1"),
        ({"versions": {"torch": "1.0"}}, "is not used: it was made with torch 1.0"),
    ],
)
def test_saved_profile_that_does_not_fit_is_noted_and_replaced(opened, tmp_path, change, text):
    sampled(opened(), SMALL)
    file = saved_profile(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    latents, report = sampled(opened(), SMALL)
    assert report.reruns == 1 and torch.isfinite(latents).all()
    assert any(text in note for note in report.notes), report.notes
    assert read(file).learned == report.learned == SCALED, "and it is written again"


def test_profile_in_workflow_is_used_if_it_fits_and_noted_if_not(opened, tmp_path):
    sampled(opened(), SMALL)
    carried = read(saved_profile(tmp_path))
    saved_profile(tmp_path).unlink()
    _, report = sampled(opened(profile=carried), SMALL)
    assert report.reruns == 0 and "from a profile" in report.text()
    assert not list((tmp_path / "profiles").iterdir()), "nothing was learned that the workflow does not carry"
    elsewhere = replace(carried, architecture="sm90")
    _, report = sampled(opened(profile=elsewhere), SMALL)
    assert "the given profile is not used: it is for sm90, but this is sm80" in report.notes
    assert report.reruns == 1
    assert read(saved_profile(tmp_path)) == carried, "what a run learned itself is saved, even if it is the same"


def test_overrides_learned_beyond_profile_in_workflow_are_saved(opened, tmp_path):
    sampled(opened(), SMALL)
    whole = read(saved_profile(tmp_path))
    saved_profile(tmp_path).unlink()
    other = PrecisionOverrides(unquantised=("transformer_blocks.0.ff.net.2",))
    _, report = sampled(opened(profile=replace(whole, learned=other)), SMALL)
    both = replace(other, all_layers_scaled=True)
    assert report.reruns == 1 and read(saved_profile(tmp_path)) == replace(whole, learned=both)


# --- a profile is right, or refused, or only costs time: none can ruin a picture --------------------------------------


@lru_cache
def run_without_profile(overflow, precision):
    return run_with_profile(overflow, precision, STEP, None)[0]


def run_with_profile(overflow, precision, policy, learned):
    """Latents and report. learned: the overrides of its profile, made in half precision; None: no profile."""
    handle = open_pipeline("5b", overflow=overflow)
    given = replace(profile_of(handle, "transformer", precision), learned=learned) if learned else None
    return sampled(replace(handle, precision=Precision(precision), policy=policy, profile=given), SMALL)


@pytest.mark.parametrize("policy", [LEARNED, OFF], ids=["learned", "off"])
@pytest.mark.parametrize(("precision", "overflow"), [("bf16", "none"), ("fp16", "none"), ("fp16", "stream")])
@pytest.mark.parametrize(
    "learned",
    [SCALED, PrecisionOverrides(unquantised=("transformer_blocks.9",)), PrecisionOverrides(fp16_error=1.0)],
    ids=["scaled", "unquantised", "fp16 accumulation"],
)
def test_no_profile_makes_result_worse(learned, precision, overflow, policy):
    """In fp16 all layers are scaled anyway. In bf16, scaled layers use float32 where bf16 would round."""
    latents, report = run_with_profile(overflow, precision, policy, learned)
    assert [(step.dtype, step.outcome) for step in report.steps] == [(precision, "finite")] * 2
    without, right = run_without_profile(overflow, precision), run_without_profile(overflow, "fp32")
    if precision == "bf16" and learned == SCALED:
        assert report.protection and error(latents, right) < 0.7 * error(without, right)
    else:
        assert bool(report.protection) == (precision == "fp16") and torch.equal(latents, without)
    assert [note.startswith("from a profile: ") for note in report.notes if "profile" in note] == [True]


@pytest.mark.parametrize(
    ("precision", "policy"),
    [("bf16", STEP), ("fp16", STEP), *product(("fp16 (plain)", "fp32"), (STEP, LEARNED))],
)
def test_unused_profile_is_noted(precision, policy):
    for learned in (SCALED, None):
        latents, report = run_with_profile("none", precision, policy, learned)
        assert [note for note in report.notes if "profile" in note] == [PROFILE_UNUSED] * (learned is not None)
        assert report.learned in (None, NOTHING) and bool(report.protection) == (precision == "fp16")
        assert torch.equal(latents, run_without_profile("none", precision))
