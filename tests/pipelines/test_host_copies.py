"""Whether main memory keeps what went to the device, and that no run changes a weight: a change through `.data` would
be lost. What is copied is counted on the second device, in devices/on_it/host_copies.py.
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
def test_a_device_that_shares_main_memory_keeps_nothing_there(
    monkeypatch: pytest.MonkeyPatch, device: str, integrated: bool, own: bool
) -> None:
    properties = type("Properties", (), {"is_integrated": integrated})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    assert has_own_memory(torch.device(device)) == own


def test_what_is_in_float64_comes_in_float32_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CogVideoX's table of positions, on an Apple GPU."""
    layer: Any = nn.Linear(2, 2)
    layer.register_buffer("table", torch.arange(4.0).double() / 3)
    for has, dtype in ((True, torch.float64), (False, torch.float32)):
        monkeypatch.setattr(placement, "has_float64", lambda _device, has=has: has)
        move(layer, HOST)
        assert torch.equal(layer.table, (torch.arange(4.0).double() / 3).to(dtype))
    assert layer.weight.dtype == torch.float32


class Watched(PlainPlacement):
    """Main memory as a device: what a component held when it came, and whether a change was seen when it went."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.held: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.seen: list[tuple[str, bool, bool]] = []  # component, whether it is as it was, and seems so

    def to_device(self, name: str, module: nn.Module, beside: int = 0) -> None:
        if name not in self.held:
            self.held[name] = [(t, t.detach().clone()) for t in tensors_of(module)]
            for t in tensors_of(module):
                placement._HOST_COPIES[t] = t, t.data, 0 if t.is_inference() else t._version

    def to_host(self, name: str, module: nn.Module) -> None:
        for tensor, values in self.held.pop(name, ()):
            seems = placement._host_copy(tensor) is not None
            placement._HOST_COPIES.pop(tensor, None)
            self.seen.append((name, torch.equal(tensor, values), seems))


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
    assert all(seems for *_, seems in watched.seen), "else it is copied for nothing"
