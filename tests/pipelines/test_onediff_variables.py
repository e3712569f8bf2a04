"""Environment variables that OneDiff's own functions set when it compiles, during a stage and after it."""

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
    SWITCHES,
    Accumulation,
    accumulation,
)
from comfyui_onediff_guard.precision.arch import named
from onediff.infer_compiler.backends import registry
from onediff.infer_compiler.backends.env_var import set_oneflow_env_vars
from onediff.utils import parse_boolean_from_env

AUTO, FAST, _ = Accumulation


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("ONEFLOW_", "NEXFORT_"))}


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SWITCHES, *variables()):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compile_options_set_no_variable(dynamic: bool | None) -> None:
    set_oneflow_env_vars(CompileOptions(dynamic).given_to("oneflow"))
    assert variables() == {}


def test_variable_that_kernel_overwrote_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDiff's attention for OneFlow does so at a launch if a model sets upcast_attention."""
    monkeypatch.setenv(ATTENTION_SWITCH, "1")
    with accumulation(named("sm80")):
        os.environ[ATTENTION_SWITCH] = "0"
    assert os.environ[ATTENTION_SWITCH] == "1"


@pytest.mark.parametrize(
    ("card", "request_", "allowed"), [("sm70", AUTO, True), ("sm80", AUTO, False), ("sm80", FAST, False)]
)
@pytest.mark.parametrize("exported", ["", "1", "0", "yes", "off"])
def test_option_of_nexfort_follows_variable_or_card(
    monkeypatch: pytest.MonkeyPatch, card: str, request_: Accumulation, allowed: bool, exported: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(registry._BACKENDS, "nexfort", lambda module, *, options: seen.append(options) or module)
    if exported:
        monkeypatch.setenv(NEXFORT_SWITCH, exported)
        allowed = bool(parse_boolean_from_env(NEXFORT_SWITCH))
    with accumulation(named(card), request_):
        compiled(torch.nn.Sequential(torch.nn.Linear(2, 2)), ("0",), BackendChoice("nexfort", "as you chose"))
    assert seen == [{"options": {NEXFORT_OPTION: allowed}}]
