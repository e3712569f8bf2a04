"""Copies in system RAM of weights on the device, and that no run changes a weight: a change through `.data` would be
lost. devices/on_it/host_copies.py counts copies on an accelerator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import placement
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement, has_own_memory, move, tensors_of
from small_runs import opened
from test_step_cache_runs import run
from torch import nn

HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "integrated", "own"),
    [("cuda", False, True), ("cuda", True, False), ("mps", None, False), ("xpu", None, False), ("cpu", None, False)],
)
def test_only_discrete_gpus_have_their_own_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, integrated: bool, own: bool
) -> None:
    properties = type("Properties", (), {"is_integrated": integrated})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    assert has_own_memory(torch.device(device)) == own


def test_float64_becomes_float32_on_devices_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CogVideoX's table of positions on an Apple GPU."""
    layer: Any = nn.Linear(2, 2)
    layer.register_buffer("table", torch.arange(4.0).double() / 3)
    for has, dtype in ((True, torch.float64), (False, torch.float32)):
        monkeypatch.setattr(placement, "has_float64", lambda _device, has=has: has)
        move(layer, HOST)
        assert torch.equal(layer.table, (torch.arange(4.0).double() / 3).to(dtype))
    assert layer.weight.dtype == torch.float32


class Watched(PlainPlacement):
    """System RAM as a device: the values of a component on arrival, and whether they had changed when it left."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.held: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.seen: list[tuple[str, bool, bool]] = []  # component, whether it is unchanged, and has its host copy

    def to_device(self, name: str, module: nn.Module, beside: int = 0) -> None:
        if name not in self.held:
            self.held[name] = [(t, t.detach().clone()) for t in tensors_of(module)]
            for t in tensors_of(module):
                placement._HOST_COPIES[t] = t, t.data, 0 if t.is_inference() else t._version

    def to_host(self, name: str, module: nn.Module) -> None:
        for tensor, values in self.held.pop(name, ()):
            has_copy = placement._host_copy(tensor) is not None
            placement._HOST_COPIES.pop(tensor, None)
            self.seen.append((name, torch.equal(tensor, values), has_copy))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("model", "precision", "overflow"),
    [
        ("2b", "fp16", "stream"),
        ("5b-i2v", "bf16", "none"),
        ("cogview3", "fp16", "stream"),
        ("cogview4", "fp16", "none"),
        ("svd", "fp16", "none"),
        ("wan-two", "fp16", "stream"),
        ("2b", "int8", "none"),
    ],
)
def test_no_run_changes_a_weight(model: str, precision: str, overflow: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        stores._STORES.clear()
        handle = opened(model, "model", precision, overflow)
        handle.store.placement = watched = Watched()
        decode(handle, run(handle, model, steps=2)[0])
    assert {name for name, *_ in watched.seen} == {*handle.store.model.weights}
    assert all(same for _, same, _ in watched.seen), "else a change through .data would be lost"
    assert all(has_copy for *_, has_copy in watched.seen), "else it is copied needlessly"
