"""Compiling through OneDiff: the choice of a backend, and that the original denoiser stays unchanged."""

from __future__ import annotations

import logging
import sys
import types
from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.pipelines.compile.backends import (
    BackendChoice,
    CompileOptions,
    choose_backend,
    compiled,
    for_dtype,
)
from comfyui_onediff_guard.pipelines.errors import BackendUnavailable
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.accumulation import NEXFORT_OPTION
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from in_blocks import Denoiser
from onediff.infer_compiler import OneflowCompileOptions
from overflows import fails_in_half
from small_runs import SMALL, opened, sampled
from torch._dynamo.utils import counters

ONEFLOW, OF_NEXFORT = OneflowCompileOptions(), {"options": {NEXFORT_OPTION: True}}
TUNED, EACH = "max-autotune-no-cudagraphs", "a graph for each size"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def denoiser():
    return Denoiser(torch.nn.Linear(4, 4) for _ in range(3))


@pytest.fixture
def no_modules(monkeypatch):
    """find_spec as on a machine without those packages."""

    def hide(*names):
        original = compiling.importlib.util.find_spec
        monkeypatch.setattr(
            compiling.importlib.util, "find_spec", lambda n, *a: None if n in names else original(n, *a)
        )

    return hide


def test_reason_of_auto_names_missing_backends(no_modules, monkeypatch, caplog):
    no_modules("oneflow", "nexfort", "triton")
    monkeypatch.setattr(compiling, "find_c_compiler", lambda: None)
    with caplog.at_level(logging.WARNING, "comfyui_onediff_guard"):
        choice = choose_backend("auto", CPU)
    assert choice.name == "eager"
    assert "no C++ compiler" in choice.reason or "needs a C++ compiler, and none was found" in choice.reason
    assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0]

    choice = choose_backend("auto", CUDA)
    assert "oneflow is not installed" in choice.reason
    assert "nexfort is not installed" in choice.reason
    assert "Triton, which is not installed" in choice.reason


@pytest.mark.parametrize("backend", ["oneflow", "nexfort"])
def test_unavailable_backend_chosen_by_name_is_refused(backend):
    with pytest.raises(BackendUnavailable, match=rf"Backend '{backend}' does not work here.*'auto' or 'eager'"):
        choose_backend(backend, CPU)


def test_oneflow_placeholder_of_pypi_that_raises_is_refused(tmp_path, monkeypatch):
    (tmp_path / "oneflow.py").write_text("raise RuntimeError('not for this Python')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"RuntimeError: not for this Python; OneDiff needs OneFlow's special"):
        choose_backend("oneflow", CUDA)
    sys.modules.pop("oneflow", None)


def test_c_compiler_is_found_on_windows(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling, "os", types.SimpleNamespace(name="nt", environ={}))
    found = {"cl": "C:/VC/cl.exe", "g++": "C:/mingw/g++.exe"}
    monkeypatch.setattr(compiling.shutil, "which", found.get)
    assert compiling.find_c_compiler() == "C:/VC/cl.exe"
    found.pop("cl")
    assert compiling.find_c_compiler() is None


def test_missing_headers_of_embedded_python_are_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "find_c_compiler", lambda: "cl.exe")
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda _name: str(tmp_path))
    choice = choose_backend("auto", CPU)
    assert choice.name == "eager" and f"{tmp_path} has no Python.h" in choice.reason and "embedded" in choice.reason
    with pytest.raises(BackendUnavailable, match="put 'include' and 'libs' of the same"):
        choose_backend("inductor", CPU)
    (tmp_path / "Python.h").touch()
    assert choose_backend("auto", CPU).name == "inductor"


def test_eager_compiles_nothing():
    model = denoiser()
    assert compiled(model, ("blocks",), BackendChoice("eager", "")) is model


def test_inductor_is_registered_in_onediffs_registry_once():
    import onediff.infer_compiler
    from onediff.infer_compiler.backends import registry

    compiling._register_inductor()
    first = registry._BACKENDS["inductor"]
    compiling._register_inductor()
    assert registry._BACKENDS["inductor"] is first
    block = torch.nn.Linear(2, 2)
    again = onediff.infer_compiler.compile(types.SimpleNamespace(_torch_module=block), backend="inductor")
    assert again._orig_mod is block, "what OneDiff has wrapped is unwrapped before compiling again"


def test_blocks_are_compiled_in_shallow_copy_through_onediff(monkeypatch):
    from onediff.infer_compiler.backends import registry

    seen = []
    monkeypatch.setitem(registry._BACKENDS, "recording", lambda module, *, options=None: seen.append(module) or module)
    model = denoiser()
    blocks = list(model.blocks)
    copied = compiled(model, ("blocks",), BackendChoice("recording", ""))
    assert seen == blocks
    assert copied is not model and list(model.blocks) == blocks
    assert copied.blocks is not model.blocks
    x = torch.randn(2, 4)
    assert torch.equal(copied(x), model(x))


def test_rerun_and_other_seed_add_no_graph_of_inductor(caplog):
    handle = opened("2b", precision="bf16", backend="inductor")
    handle = replace(handle, policy=GuardPolicy(scope=Scope.STEP))
    handle.store.module("transformer", "bf16").proj_out.register_forward_hook(fails_in_half)
    before = counters["stats"]["unique_graphs"]
    latents, report = sampled(handle, SMALL)
    assert report.reruns == len(report.steps)
    assert report.backend == "inductor"
    graphs = counters["stats"]["unique_graphs"]
    assert graphs - before == 1, "identical blocks share one graph"

    with caplog.at_level(logging.INFO, "comfyui_onediff_guard"):
        sampled(handle, SMALL, seed=4)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not [m for m in caplog.messages if m.startswith(("loading", "encoding", "compiling"))]

    expected, _ = sampled(replace(handle, backend=BackendChoice("eager", "")), SMALL)
    assert torch.equal(latents, expected), "every step was rerun by the untouched original"


@pytest.mark.parametrize(("card", "dtype"), [("sm75", "fp16"), ("sm75", "fp32"), ("sm80", "bf16"), ("cpu", "bf16")])
def test_dtype_that_card_supports_is_compiled(card, dtype):
    choice = BackendChoice("inductor", "as you chose")
    assert for_dtype(choice, arch.named(card), dtype) is choice


def test_emulated_bf16_is_not_compiled():
    auto = for_dtype(BackendChoice("inductor", "auto: first choice", automatic=True), arch.named("sm75"), "bf16")
    assert auto.name == "eager" and "inductor cannot compile bf16 for sm75 (Turing)" in auto.reason
    with pytest.raises(BackendUnavailable, match="Choose precision 'auto' or 'fp16', or backend 'eager'"):
        for_dtype(BackendChoice("oneflow", "as you chose"), arch.named("sm70"), "bf16")
    eager = BackendChoice("eager", "as you chose: nothing is compiled")
    assert for_dtype(eager, arch.named("sm70"), "bf16") is eager


@pytest.mark.parametrize(
    ("backend", "chosen", "passed", "text"),
    [
        ("inductor", CompileOptions(), {"dynamic": None, "mode": "default"}, ""),
        ("inductor", CompileOptions(False, TUNED), {"dynamic": False, "mode": TUNED}, f"{EACH}, mode {TUNED}"),
        ("nexfort", CompileOptions(True), OF_NEXFORT | {"dynamic": True}, "one graph for all sizes"),
        ("nexfort", CompileOptions(mode=TUNED), OF_NEXFORT, f"mode {TUNED}: not used, only inductor has modes"),
        ("oneflow", CompileOptions(), ONEFLOW, ""),
        ("oneflow", CompileOptions(False), replace(ONEFLOW, dynamic=False), EACH),
        ("oneflow", CompileOptions(attention="flash"), ONEFLOW, "attention: flash: not used, oneflow has its own"),
    ],
)
def test_each_backend_gets_its_own_options(monkeypatch, backend, chosen, passed, text):
    from onediff.infer_compiler.backends import registry

    seen = []
    monkeypatch.setitem(registry._BACKENDS, backend, lambda module, *, options: seen.append(options) or module)
    compiled(denoiser(), ("blocks",), BackendChoice(backend, "as you chose"), chosen)
    assert seen == [passed] * 3
    assert chosen.in_words(backend) == text
    assert chosen.in_words("eager") == ("attention: flash" if chosen.attention == "flash" else "")
