"""Fuzzing of profiles: a damaged or malicious profile is rejected with a reason or harmless to the result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.run.denoiser import PROFILE_UNUSED
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import profile_of
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import (
    BadProfile,
    PrecisionOverrides,
    Profile,
    parse,
    read,
    read_all,
    write,
)
from comfyui_onediff_guard.precision.policy import Precision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_text
from small_runs import opened
from tiers import by_tier

PROFILE = Profile(
    model="CogVideoX-5b",
    weights="0123456789abcdef" * 2,
    loras=("0" * 32 + " at 0.8",),
    architecture="sm75",
    dtype="fp16",
    versions={"torch": "2.13", "diffusers": "0.42"},
    learned=PrecisionOverrides(unquantised=("transformer_blocks.3", "transformer_blocks.17"), fp16_error=0.001),
)
SEED = json.loads(PROFILE.text())
OPTIONS: Any = {"suppress_health_check": list(HealthCheck)}


@settings(max_examples=by_tier(15_000, 150), **OPTIONS)
@given(data=mutated_text(SEED))
def test_damaged_profile_is_rejected_with_a_reason_or_valid(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "found.json"
    file.write_bytes(data)
    found, refused = _read(file)
    if found is None:
        assert refused.startswith(("'found.json' cannot", "The profile 'found.json'")) and len(refused) < 1000
        return
    assert found.learned.to_share == found.learned and len(found.learned.unquantised) <= 1000
    assert parse(found.text(), "it") == found
    again = write(tmp_path / "kept", found)
    assert again.parent == tmp_path / "kept" and [profile for _, profile in read_all(again.parent)] == [found]
    assert found.in_words() and isinstance(found.misfit(PROFILE), str)
    again.unlink()


def _read(file: Path) -> tuple[Profile | None, str]:
    try:
        return read(file), ""
    except BadProfile as error:
        return None, str(error)


class Tiny:
    """A pipeline whose residual stream overflows fp16, and its fp32 result."""

    SETTINGS = SampleSettings(width=64, height=48, frames=9, steps=2, guidance_scale=6.0, seed=3, scheduler="DDIM")

    def __init__(self, folder: Path):
        self._handle = opened(folder)
        (self._positive, self._negative), _ = encode_prompts(self._handle, ["a red kite", ""])
        self._exact, _ = sample(self._handle, self._positive, self._negative, self.SETTINGS)
        self.profile = profile_of(self._handle, "transformer", "fp16")

    def error_with(self, profile: Profile, scope: Scope) -> tuple[float, list[str]]:
        """(relative error of an fp16 run with a profile, its report's notes on the profile)"""
        policy = GuardPolicy(scope=scope)
        handle = replace(self._handle, precision=Precision.FP16, policy=policy, profile=profile)
        handle.store.learned.clear()
        latents, report = sample(handle, self._positive, self._negative, self.SETTINGS)
        assert report.failed == 0 and len(report.steps) == self.SETTINGS.steps
        error = ((latents - self._exact).norm() / self._exact.norm()).item()
        return error, [note for note in report.notes if "profile" in note]


@pytest.fixture(scope="module")
def tiny(model_folder: Any) -> Tiny:
    return Tiny(model_folder("5b", "stream"))


def accepted(of: Profile) -> st.SearchStrategy[Profile]:
    """Profiles of the same model that `parse` accepts, with damaged overrides."""
    parts = st.sampled_from(
        ["transformer_blocks.0", "transformer_blocks.1", "proj_out", "time_embedding.linear_1", "x"]
    )
    names = st.lists(parts, max_size=3, unique=True).map(tuple)
    whole = st.builds(PrecisionOverrides, all_layers_scaled=st.booleans(), unquantised=names)
    one = PrecisionOverrides(unquantised=("transformer_blocks.1",))
    damaged = mutated(json.loads(replace(of, learned=one).text()))
    return st.one_of(whole.map(lambda learned: replace(of, learned=learned)), damaged.filter(_is_accepted).map(_parsed))


def _is_accepted(value: Any) -> bool:
    try:
        return bool(_parsed(value))
    except BadProfile:
        return False


def _parsed(value: Any) -> Profile:
    return parse(json.dumps(value), "it")


@settings(max_examples=by_tier(60, 4), **OPTIONS)
@given(data=st.data(), scope=st.sampled_from([Scope.STEP, Scope.LEARNED]))
def test_accepted_profiles_keep_the_error_below_half_a_percent(tiny: Tiny, data: st.DataObject, scope: Scope) -> None:
    error, said = tiny.error_with(data.draw(accepted(tiny.profile)), scope)
    assert error < 0.005 and len(said) == 1, (error, said)
    assert (said == [PROFILE_UNUSED]) == (scope is Scope.STEP)
