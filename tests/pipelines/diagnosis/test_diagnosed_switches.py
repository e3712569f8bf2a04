"""Compile backends and accumulation switches: which, why, and set by whom."""

from __future__ import annotations

import os

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.pipelines.insight.diagnosis import diagnose
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, SWITCHES, Accumulation
from told import switch

SM75, SM80 = arch.named("sm75"), arch.named("sm80")


@pytest.mark.parametrize("compiler", ["c++", None])
def test_backends_are_those_of_auto(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    monkeypatch.setattr(compiling, "find_c_compiler", lambda: compiler)
    found = diagnose().backends
    assert [state.name for state in found.states] == list(compiling.BACKENDS[1:])
    assert found.chosen == compiling.choose_backend("auto", torch.device("cpu")).name
    assert {state.name for state in found.states if not state.found} == (
        {"oneflow", "nexfort"} if compiler else {"oneflow", "nexfort", "inductor"}
    )
    assert all(state.reason for state in found.states)


def test_what_the_user_set_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_ENABLE_MATMUL_FP16_REDUCTION", "1")
    text = diagnose(architecture=SM80).text()
    said = ("set by you", "NEXFORT_ENABLE_MATMUL_FP16_REDUCTION = 1", "set by onediff-guard")
    assert sorted(said, key=text.index) == list(said)


def test_every_switch_and_who_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    found = diagnose(architecture=SM75)
    assert [s.name for s in found.switches] == list(SWITCHES)
    assert {s.set_by for s in found.switches} == {"onediff-guard", "default"}
    assert all(f"{s.name} = {s.value}" in found.text() for s in found.switches)
    fast = diagnose(architecture=SM75, accumulation=Accumulation.FAST)
    assert switch(fast, ATTENTION_SWITCH).value == "1"
    assert dict(os.environ) == before, "asking sets nothing"
