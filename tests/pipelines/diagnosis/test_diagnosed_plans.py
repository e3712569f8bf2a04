"""Diagnosis of plans: what would run and why, for models, for a loaded pipeline, and by which switches."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.insight.diagnosis import NOT_RUN, diagnose, diagnose_pipeline, summary
from comfyui_onediff_guard.precision import accumulation, arch
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, SWITCHES, Accumulation
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure
from comfyui_onediff_guard.precision.policy import Precision
from hostile import say
from small_runs import opened
from told import one_line, switch

SM75, SM80 = arch.named("sm75"), arch.named("sm80")


def test_all_variants_are_planned_if_no_model_is_named() -> None:
    found = diagnose(architecture=SM75)
    assert [model.variant for model in found.models] == list(VARIANTS)
    for model in found.models:
        assert tuple(plan.component for plan in model.plans) == VARIANTS[model.variant].components
    text = found.text()
    assert re.search(r"CogVideoX-5B +fp16 protected +– +fp16 protected +fp16 protected +fp16\n", text)
    assert re.search(r"SVD +– +fp16 +fp16 protected +fp16 +fp16\n", text)
    assert text.count("has no native bf16") == 1, "each reason once"
    assert "plans are for" in text and not found.here


def test_failing_import_of_diffusers_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert sum("import of diffusers halted" in note for note in diagnose(folder).notes) == 1
    say(folder / "transformer" / "config.json", in_channels="sixteen")
    with pytest.raises(BadFolder, match=r"transformer/config.json' cannot be used: its fields have unexpected types"):
        diagnose(folder)


def test_fp16_accumulation_is_shown_with_missing_requirements(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"precision": Precision.FP16, "accumulation": Accumulation.FP16}
    found = one_line(diagnose(folder, arch.ARCHITECTURES["sm89"], **request))
    assert (
        "fp16 sums reason of denoiser: on if the first step is accurate with it" in found and "PyTorch 2.7" not in found
    )
    assert "it is faster only on GeForce RTX" in one_line(diagnose(folder, SM80, **request))
    assert "fp16 sums: on if the first step is accurate" in one_line(
        diagnose(None, arch.ARCHITECTURES["sm89"], **request)
    )
    monkeypatch.setattr(accumulation, "FP16_SUMS", "a switch of a newer PyTorch")
    assert "needs PyTorch 2.7 or newer" in one_line(diagnose(folder, arch.ARCHITECTURES["sm89"], **request))
    assert "needs PyTorch 2.7" not in one_line(diagnose(folder, SM80, **request)), "no faster there"


def test_impossible_precision_is_refused_with_reason() -> None:
    before_14 = replace(arch.ARCHITECTURES["mps"], label="Apple GPU before macOS 14", bf16="none")
    found = diagnose(architecture=before_14, precision=Precision.BF16)
    assert all(not model.plans and model.refused for model in found.models)
    assert "refused: mps (Apple GPU before macOS 14) has no bf16, not even emulated" in one_line(found)


# --- a pipeline on a wire ---------------------------------------------------------------------------------------------


def test_diagnosis_of_pipeline_shows_its_settings(folder: Path) -> None:
    say(folder / "vae" / "config.json", made_up=1)
    handle = replace(
        opened(folder, precision="fp16"),
        policy=GuardPolicy(OnFailure.STOP, exact_fp32=True),
        accumulation=Accumulation.FAST,
        architecture=SM80,
        beside=(SM80,),
    )
    found = diagnose_pipeline(handle)
    assert found.here and found.architecture == SM80
    assert (found.precision, found.accumulation) == (Precision.FP16, Accumulation.FAST)
    assert (found.on_failure, found.exact_fp32, found.backends.chosen) == ("stop", True, "eager")
    assert found.backends.reason == handle.backend.reason
    assert found.models[0].plans == tuple(handle.plan(component) for component in handle.store.model.variant.components)
    assert switch(found, ATTENTION_SWITCH).value == "1"
    assert "denoiser fp16 stop yes" in one_line(found)
    assert "full fp32 instead of TF32: exact_fp32 is on" in one_line(found)
    assert handle.store.loaded() == {}, "no weight was read"
    handle.store.module("vae", "fp32")
    assert sum("made_up" in note for note in diagnose_pipeline(handle).notes) == 1, "although loading notes it too"


def test_diagnosis_of_pipeline_is_for_its_device_and_other_gpus(folder: Path, cards: Callable[..., None]) -> None:
    handle = replace(opened(folder), architecture=arch.named("sm70"), beside=(SM75,))
    cards((12, 0))
    found = diagnose_pipeline(handle)
    assert (found.machine.device, found.machine.gpus[0].name) == ("cpu", "Card 0")
    assert "shared with another GPU" in switch(found, ATTENTION_SWITCH).reason


# --- compile backends and accumulation switches -----------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["c++", None])
def test_diagnosed_backends_are_those_of_auto(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    monkeypatch.setattr(compiling, "find_c_compiler", lambda: compiler)
    found = diagnose().backends
    assert [state.name for state in found.states] == list(compiling.BACKENDS[1:])
    assert found.chosen == compiling.choose_backend("auto", torch.device("cpu")).name
    assert {state.name for state in found.states if not state.found} == (
        {"oneflow", "nexfort"} if compiler else {"oneflow", "nexfort", "inductor"}
    )
    assert all(state.reason for state in found.states)


def test_switches_set_by_user_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_ENABLE_MATMUL_FP16_REDUCTION", "1")
    text = diagnose(architecture=SM80).text()
    said = ("set by you", "NEXFORT_ENABLE_MATMUL_FP16_REDUCTION = 1", "set by onediff-guard")
    assert sorted(said, key=text.index) == list(said)


def test_every_switch_is_listed_with_who_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    found = diagnose(architecture=SM75)
    assert [s.name for s in found.switches] == list(SWITCHES)
    assert {s.set_by for s in found.switches} == {"onediff-guard", "default"}
    assert all(f"{s.name} = {s.value}" in found.text() for s in found.switches)
    fast = diagnose(architecture=SM75, accumulation=Accumulation.FAST)
    assert switch(fast, ATTENTION_SWITCH).value == "1"
    assert dict(os.environ) == before, "asking sets nothing"


# --- both forms -------------------------------------------------------------------------------------------------------


def test_text_is_narrow_and_dict_is_json(folder: Path) -> None:
    diagnoses = [diagnose(folder, SM75), diagnose(folder, SM80, precision=Precision.FP16_PLAIN)]
    diagnoses += [diagnose(architecture=a, precision=p) for a in arch.ARCHITECTURES.values() for p in Precision]
    for found in diagnoses:
        assert not [line for line in found.text().splitlines() if len(line) > 100 or line != line.rstrip()]
        short = summary(found).splitlines()
        assert len(short) <= 22 and max(map(len, short)) < 80, "one screen of a terminal of default width"
        fields = found.as_dict()
        assert json.loads(json.dumps(fields, allow_nan=False)) == fields, "no enum, tuple or key that JSON would change"
        assert fields["models"][0]["variant"] in found.text()


@pytest.mark.parametrize("page", ["README.md", "docs/testing.md"])
def test_docs_list_what_has_not_been_run(page: str, root: Path) -> None:
    section = (root / page).read_text(encoding="utf-8").split("\n## What has not been run\n")[1].split("\n## ")[0]
    assert [line.split(":")[0] for line in NOT_RUN] == re.findall(r"^- ([^:]+):", section, re.MULTILINE)
    assert all(line.split(":")[0] in one_line(diagnose()) for line in NOT_RUN)
