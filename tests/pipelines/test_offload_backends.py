"""Which backends work with which offload: refused before anything is loaded, or 'auto' goes on to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.nodes.compile import Compile
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice
from comfyui_onediff_guard.pipelines.errors import BackendUnavailable
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights.offload import Offload, backend_with
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WORKS = {
    "auto": {"oneflow", "nexfort", "inductor", "eager"},
    "none": {"oneflow", "nexfort", "inductor", "eager"},
    "model": {"nexfort", "inductor", "eager"},
    "group": {"inductor", "eager"},
    "sequential": {"eager"},
}


@pytest.fixture
def installed(monkeypatch):
    """Backends that work here, for the probe."""

    def install(*names):
        missing = {name: (lambda _device: None) if name in names else (lambda _device: "it is not there")
                   for name in compiling._PROBES}  # fmt: skip
        monkeypatch.setattr(compiling, "_PROBES", missing)

    return install


@pytest.mark.parametrize("offload", list(Offload))
@pytest.mark.parametrize("backend", sorted(WORKS["none"]))
def test_a_backend_asked_for_works_or_is_refused_with_the_reason(installed, backend, offload):
    installed("oneflow", "nexfort", "inductor")
    choice = BackendChoice(backend, "as you chose")
    if backend in WORKS[offload.value]:
        assert backend_with(choice, offload, CUDA) == choice
        return
    with pytest.raises(BackendUnavailable) as refused:
        backend_with(choice, offload, CUDA)
    text = str(refused.value)
    assert text.startswith(f"{backend} does not work with offload '{offload.value}': ")
    named = text.split("Choose backend ")[1]
    assert all(f"'{other}'" in named for other in WORKS[offload.value] - {"nexfort"})
    kinds = [kind for kind in WORKS if backend in WORKS[kind]]
    assert named.endswith("offload '" + "', '".join(kinds) + "'.")


@pytest.mark.parametrize(
    ("backends", "offload", "found"),
    [
        (["oneflow", "inductor"], "group", "inductor"),
        (["oneflow"], "group", "eager"),
        (["nexfort", "inductor"], "group", "inductor"),
        (["nexfort", "inductor"], "model", "nexfort"),
        (["oneflow", "inductor"], "model", "inductor"),
        (["inductor"], "sequential", "eager"),
        (["oneflow", "inductor"], "none", "oneflow"),
    ],
)
def test_auto_goes_on_to_the_next_that_works_and_says_why(installed, backends, offload, found):
    installed(*backends)
    first = compiling.choose_backend("auto", CUDA)
    assert first.name == backends[0]
    chosen = backend_with(first, Offload(offload), CUDA)
    assert chosen.name == found and chosen.automatic
    if found != first.name:
        assert f"auto: {first.name} does not work with offload '{offload}': " in chosen.reason


def test_where_offload_means_nothing_nothing_is_refused():
    choice = BackendChoice("inductor", "as you chose")
    assert backend_with(choice, Offload.SEQUENTIAL, CPU) is choice


def test_the_loader_and_the_compile_node_refuse_before_anything_is_loaded(model_folder, installed, monkeypatch):
    installed("inductor")
    for module in (handles, offloading):
        monkeypatch.setattr(module, "brings_parts_to", lambda _device: True)
    options: dict[str, Any] = {"precision": Precision.BF16, "offload": "sequential", "placement": PlainPlacement()}
    with pytest.raises(BackendUnavailable, match="inductor does not work with offload 'sequential': a compiled block"):
        load(model_folder("2b"), COGVIDEOX, backend="inductor", **options)
    handle = load(model_folder("2b"), COGVIDEOX, backend="auto", **options)
    assert handle.backend.name == "eager" and "a compiled block is one piece" in handle.backend.reason
    with pytest.raises(BackendUnavailable, match="Choose backend 'eager', or offload 'auto', 'none', 'model', 'group'"):
        Compile().apply(handle, "inductor", "auto", "default", False)
    (again,) = Compile().apply(handle, "auto", "auto", "default", False)
    assert again.backend.name == "eager"
    (again,) = Compile().apply(replace(handle, offload=Offload.GROUP), "inductor", "auto", "default", False)
    assert again.backend.name == "inductor"
    assert handle.store.loaded() == {}
