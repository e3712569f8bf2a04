"""What OneDiff's own functions write into the environment when it compiles, while a stage runs and after it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions, compiled
from comfyui_onediff_guard.precision.accumulation import (
    ATTENTION_SWITCH,
    NEXFORT_OPTION,
    NEXFORT_SWITCH,
    ONEDIFF_DEFAULTS,
    SCORES_SWITCH,
    SWITCHES,
    Accumulation,
    accumulation,
)
from comfyui_onediff_guard.precision.arch import named
from onediff.infer_compiler.backends import registry
from onediff.infer_compiler.backends.env_var import set_oneflow_default_env_vars, set_oneflow_env_vars
from onediff.utils import parse_boolean_from_env

AUTO, FAST, _ = Accumulation
CONV = "ONEFLOW_CONV_ALLOW_HALF_PRECISION_ACCUMULATION"
OFTEN_EXPORTED = ({}, {ATTENTION_SWITCH: "1"}, {ATTENTION_SWITCH: "no"}, {CONV: "0"}, {SCORES_SWITCH: "-1"})


def compile_with_onediff(how: CompileOptions | None = None) -> None:
    """As its backend 'oneflow' begins."""
    set_oneflow_default_env_vars()
    set_oneflow_env_vars((how or CompileOptions()).given_to("oneflow"))


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("ONEFLOW_", "NEXFORT_"))}


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SWITCHES, *variables()):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)


def test_the_table_has_what_onediff_sets_and_its_values() -> None:
    set_oneflow_default_env_vars()
    assert variables() == dict.fromkeys(ONEDIFF_DEFAULTS, "1")
    assert set(ONEDIFF_DEFAULTS) < set(SWITCHES)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_options_leave_the_variables_to_who_set_them(dynamic: bool | None) -> None:
    set_oneflow_env_vars(CompileOptions(dynamic).given_to("oneflow"))
    assert variables() == {}


@pytest.mark.parametrize("exported", OFTEN_EXPORTED, ids=str)
@pytest.mark.parametrize("request_", Accumulation)
@pytest.mark.parametrize("card", ["sm70", "sm80", "sm90"])
def test_a_kernel_sees_the_same_before_during_and_after_a_compile_and_in_a_run_without_one(
    monkeypatch: pytest.MonkeyPatch, card: str, request_: Accumulation, exported: dict[str, str]
) -> None:
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    seen = []
    for compiles in (True, False):
        with accumulation(named(card), request_) as switches:
            seen.append(variables())
            if compiles:
                compile_with_onediff()
            seen.append(variables())
        assert variables() == exported, "as it was, and unset stays unset"
    assert seen == [seen[0]] * 4
    halves = card == "sm70" or request_ is FAST
    plan = {ATTENTION_SWITCH: "1" if halves else "0"} | ({SCORES_SWITCH: "0"} if request_ is FAST else {})
    assert seen[0].items() >= (dict.fromkeys(ONEDIFF_DEFAULTS, "1") | plan | exported).items()
    told = {switch.name: switch for switch in switches}
    assert all(told[name].set_by == "user" and told[name].value == value for name, value in exported.items())
    assert {told[name].set_by for name in ONEDIFF_DEFAULTS if name not in exported} == {"onediff"}
    assert all(told[name].value == value for name, value in seen[0].items())


def test_runs_that_overlap_put_nothing_back_before_the_last_has_ended() -> None:
    first, second = accumulation(named("sm70")), accumulation(named("sm80"))
    with first:
        compile_with_onediff()
        second.__enter__()
        compile_with_onediff()
        shared = variables()
    assert shared[ATTENTION_SWITCH] == "0", "safe for both, whoever compiles"
    assert variables() == shared
    second.__exit__(None, None, None)
    assert variables() == {}


def test_what_a_kernel_wrote_over_the_users_value_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDiff's attention for OneFlow does so at a launch, where a model asks for upcast_attention."""
    monkeypatch.setenv(ATTENTION_SWITCH, "1")
    with accumulation(named("sm80")):
        os.environ[ATTENTION_SWITCH] = "0"
    assert os.environ[ATTENTION_SWITCH] == "1"


@pytest.mark.parametrize(
    ("card", "request_", "allowed"), [("sm70", AUTO, True), ("sm80", AUTO, False), ("sm80", FAST, False)]
)
@pytest.mark.parametrize("exported", ["", "1", "0", "yes", "off"])
def test_nexfort_is_told_what_stands(
    monkeypatch: pytest.MonkeyPatch, card: str, request_: Accumulation, allowed: bool, exported: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(registry._BACKENDS, "nexfort", lambda module, *, options: seen.append(options) or module)
    if exported:
        monkeypatch.setenv(NEXFORT_SWITCH, exported)
        allowed = bool(parse_boolean_from_env(NEXFORT_SWITCH))
    with accumulation(named(card), request_):
        compiled(torch.nn.Sequential(torch.nn.Linear(2, 2)), ("0",), BackendChoice("nexfort", "asked for"))
    assert seen == [{"options": {NEXFORT_OPTION: allowed}}]
