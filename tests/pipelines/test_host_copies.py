"""Weights that come back from the device unchanged are those that main memory still has; what changed is copied.

The device is main memory by another name, and what is moved there and back is copied and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights import placement
from comfyui_onediff_guard.pipelines.weights.parts import tensors_of
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, PlainPlacement, has_own_memory, move
from moving import CARD
from page_locked import stand_in_for_cuda
from test_offload import assert_same, opened, run
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from trained_lora import train_lora

Folder = Callable[..., Path]
HOST = torch.device("cpu")
LARGE = DeviceMemory(1 << 40, 1 << 39)


class Copies:
    """What `nn.Module.to` copies. Put in its place."""

    def __init__(self) -> None:
        self.bytes: Counter[torch.device] = Counter()  # by where they went
        self._here: dict[int, StorageWeakRef] = {}  # storages on the card

    def to(self, module: nn.Module, *args: Any, plain: Callable[..., Any] = nn.Module.to, **kwargs: Any) -> Any:
        if args not in ((CARD,), (HOST,)):
            return plain(module, *args, **kwargs)
        return module._apply(lambda tensor: self._copied(tensor, *args))

    def _copied(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if (tensor.untyped_storage()._cdata in self._here) == (device == CARD):
            return tensor
        self.bytes[device] += tensor.nbytes
        copy = tensor.detach().clone()
        if device == CARD:
            self._here[copy.untyped_storage()._cdata] = StorageWeakRef(copy.untyped_storage())
        return copy

    def taken(self) -> tuple[int, int]:
        """Bytes to the card and to main memory since they were last asked for."""
        found, self.bytes = self.bytes, Counter()
        return found[CARD], found[HOST]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Generator[Copies]:
    copies = Copies()
    monkeypatch.setattr(placement, "has_own_memory", lambda device: device == CARD)
    monkeypatch.setattr(placement, "main_memory", lambda: LARGE)
    with mock.patch.object(nn.Module, "to", lambda *args, **kwargs: copies.to(*args, **kwargs)):
        yield copies


def used_twice(handle: PipelineHandle, model: str, expected: Any, copies: Copies) -> list[tuple[int, int]]:
    """What each run copies to the card and back; their prompts are not known."""
    handle.store.placement, found = PlainPlacement(CARD), []
    for _ in range(2):
        handle.store.prompts.clear()
        assert_same(run(handle, model), expected)
        found.append(copies.taken())
    return found


def kept(handle: PipelineHandle) -> int:
    """Bytes of what main memory has of components on the card."""
    tensors = {tensor for _, module in handle.store._modules.values() for tensor in tensors_of(module)}
    return sum(tensor.nbytes for tensor in tensors if tensor in placement._HOST_COPIES)


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "cogview4", "svd", "wan-two"])
def test_what_did_not_change_is_not_copied_back(model_folder: Folder, copies: Copies, model: str) -> None:
    expected = run(opened(model_folder(model), "none"), model)
    first, second = used_twice(opened(model_folder(model), "model"), model, expected, copies)
    assert first[0] >= second[0] > 0, "a norm is tried once"
    assert first[1] == second[1] == 0


@pytest.mark.parametrize("offload", ["none", "auto"])
def test_of_what_stays_on_the_card_main_memory_keeps_nothing(
    model_folder: Folder, copies: Copies, offload: str
) -> None:
    handle = opened(model_folder("2b"), offload)
    (to_card, to_host), again = used_twice(handle, "2b", run(opened(model_folder("2b"), "none")), copies)
    encoder = placement.bytes_of(handle.store._modules["text_encoder"][1])
    assert to_card > encoder and to_host == 0
    assert again == (encoder, 0)
    assert kept(handle) == 0


def test_what_a_lora_added_is_not_copied_back(model_folder: Folder, copies: Copies, tmp_path: Path) -> None:
    lora = train_lora(tmp_path, model_folder("2b"))
    handle = add_lora(opened(model_folder("2b"), "model"), lora)
    expected = run(add_lora(opened(model_folder("2b"), "none"), lora))
    without = used_twice(opened(model_folder("2b"), "model"), "2b", run(opened(model_folder("2b"), "none")), copies)
    first, second = used_twice(handle, "2b", expected, copies)
    assert second[0] > without[1][0], "the LoRA comes too"
    assert first[1] == second[1] == 0


def test_main_memory_that_is_short_keeps_nothing(
    model_folder: Folder, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, expected = opened(model_folder("2b"), "model"), run(opened(model_folder("2b"), "none"))
    monkeypatch.setattr(placement, "main_memory", lambda: DeviceMemory(10, handle.store._unread()))
    found = used_twice(handle, "2b", expected, copies)
    assert {*handle.store.loaded()} == {"transformer", "vae"}, "the text encoder is read again"
    others = sum(placement.bytes_of(module) for _, module in handle.store._modules.values())
    assert [to_host for _, to_host in found] == [others, others]


@pytest.mark.parametrize("offload", ["group", "sequential"])
def test_weights_that_come_in_parts_go_back_to_where_they_were(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    for module in (handles, offloading, stores):
        monkeypatch.setattr(module, "brings_parts_to", lambda _device: True)
    with stand_in_for_cuda():
        handle = opened(model_folder("2b"), offload)
        at_rest = []
        for _ in range(2):
            handle.store.prompts.clear()
            run(handle)
            modules = [handle.store._modules[name][1] for name in ("text_encoder", "transformer")]
            at_rest.append([tensor.data_ptr() for module in modules for tensor in tensors_of(module)])
    assert at_rest[0] == at_rest[1]


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


def replaced(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)


def replaced_often(layer: Any) -> None:
    """Until an allocator gives out again what it had given out for the first one, where nothing prevents that."""
    first = layer.weight.untyped_storage()._cdata
    for _ in range(100):
        layer.weight.data = layer.weight.data + 1
        if layer.weight.untyped_storage()._cdata == first:
            return


def last(layer: Any) -> None:
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def in_inference_mode(layer: Any) -> None:
    with torch.inference_mode():
        layer.weight.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda layer: layer.weight.mul_(2),
    "in inference mode": in_inference_mode,
    "through a view": lambda layer: layer.weight.view(-1)[3:].zero_(),
    "through detach": lambda layer: layer.weight.detach().mul_(2),
    "loaded": lambda layer: layer.load_state_dict({"weight": layer.weight * 2}, strict=False),
    "replaced through data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "replaced often": replaced_often,
    "replaced": replaced,
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.transpose(0, 1)),
    "channels last": last,
    "another dtype": lambda layer: layer.half(),
    "a buffer in place": lambda layer: layer.table.add_(1),
    "a buffer replaced": lambda layer: layer.register_buffer("table", layer.table + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_copied(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(placement, "has_own_memory", lambda device: device == CARD)
    monkeypatch.setattr(nn.Module, "to", lambda module, _device: module._apply(torch.clone))
    layer: Any = nn.Conv2d(4, 4, 3).requires_grad_(False)
    layer.register_buffer("table", torch.arange(4.0))
    for _ in range(2):
        move(layer, CARD)
        with torch.no_grad():
            CHANGES[change](layer)
        expected = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        strides = layer.weight.stride()
        move(layer, HOST)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())
        assert layer.weight.dtype == expected["weight"].dtype and layer.weight.stride() == strides
    assert all(tensor not in placement._HOST_COPIES for tensor in tensors_of(layer))


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
        self.held: dict[str, list[tuple[torch.Tensor, Any, torch.Tensor]]] = {}
        self.seen: list[tuple[str, bool, bool]] = []  # component, whether it is as it was, and seems so

    def to_device(self, name: str, module: nn.Module, beside: int = 0) -> None:
        if name not in self.held:
            self.held[name] = [(t, placement._state(t), t.detach().clone()) for t in tensors_of(module)]

    def to_host(self, name: str, module: nn.Module) -> None:
        for tensor, state, values in self.held.pop(name, ()):
            self.seen.append((name, torch.equal(tensor, values), placement._state(tensor) == state))


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
def test_no_run_changes_a_weight(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch, model: str, precision: str, overflow: str, inference: bool
) -> None:
    folder = model_folder(model, overflow) if overflow != "none" else model_folder(model)
    with torch.inference_mode(inference):
        handle = opened(folder, "model", precision)
        handle.store.placement = watched = Watched()
        run(handle, model)
    assert {name for name, *_ in watched.seen} == {*handle.store.model.weights}
    assert all(same for _, same, _ in watched.seen), "else a change through .data would be lost"
    assert all(seems for *_, seems in watched.seen), "else it is copied for nothing"
