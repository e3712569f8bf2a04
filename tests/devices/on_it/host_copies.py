"""Host copies: unchanged weights are not copied back from the device; changed ones are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.weights import placement
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, move, tensors_of
from small_runs import CUDA, frames, opened_fresh, sampled
from torch import nn
from trained_lora import train_lora

HOST = torch.device("cpu")
OTHERS = 2**17  # bytes of prompts, positions, latents and norms that a run copies to the card, at most


def run_of(handle: PipelineHandle) -> None:
    handle.store.prompts.clear()
    if handle.family.takes_image:
        decode(handle, sampled(handle, "5b-i2v")[0])
    else:
        frames(handle)


def copied(card: Any, handle: PipelineHandle, runs: int = 2) -> list[tuple[int, int]]:
    """Bytes that each run copies (to the card, back); prompts are encoded each time."""
    found = []
    for _ in range(runs):
        torch.cuda.synchronize()
        card.reset()
        run_of(handle)
        counts = card.counts()
        found.append((counts["bytes to the device"], counts["bytes to the host"]))
    return found


def results_of(card: Any, model: str, lora: Any = None) -> int:
    """Bytes that a run copies to the host if no weights move."""
    handle = opened_fresh(model, "none")
    back = copied(card, add_lora(handle, lora) if lora else handle)[1][1]
    handle.store.empty()
    return back


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "cogview4", "wan-two"])
def test_unchanged_weights_are_not_copied_back(card: Any, model: str) -> None:
    results = results_of(card, model)
    first, second = copied(card, opened_fresh(model, "model"))
    assert first[0] >= second[0] > OTHERS, "the first run tries a norm on the card"
    assert first[1] == second[1] == results


@pytest.mark.parametrize("offload", ["none", "auto"])
def test_no_host_copy_is_kept_of_weights_that_stay_on_the_card(card: Any, offload: str) -> None:
    results, handle = results_of(card, "2b"), opened_fresh("2b", offload)
    first, again = copied(card, handle)
    sizes = {name: placement.bytes_of(component.module) for name, component in handle.store.components.items()}
    encoder = sizes.pop("text_encoder")
    assert min(sizes.values()) > OTHERS
    assert first[0] > encoder and first[1] == again[1] == results
    assert 0 <= again[0] - encoder < OTHERS, "only the encoder"
    on_card = {tensor for component in handle.store.components.values() for tensor in tensors_of(component.module)}
    assert not [tensor for tensor in on_card if tensor in placement._HOST_COPIES]


@pytest.mark.parametrize("offload", ["none", "auto"])
def test_components_evicting_each_other_are_not_copied_back(card: Any, offload: str) -> None:
    """The card has no memory for the denoiser while the VAE decodes; this is known after the first decode."""
    results, total = results_of(card, "2b"), card.total()
    handle = opened_fresh("2b", offload)
    frames(handle)
    denoiser, vae = (placement.bytes_of(handle.store.components[name].module) for name in ("transformer", "vae"))
    most = card.most_used()
    handle.store.empty()
    try:
        card.set_total(most - min(denoiser, vae) // 2)
        _, second, third = copied(card, opened_fresh("2b", offload), 3)
    finally:
        card.set_total(total)
    assert second[0] > min(denoiser, vae) > OTHERS, "one of them is copied again"
    assert second[1] == third[1] == results


def test_lora_weights_are_not_copied_back(card: Any, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    lora = train_lora(tmp_path, model_folder("2b"))
    results, without = results_of(card, "2b", lora), copied(card, opened_fresh("2b", "model"))[1]
    first, second = copied(card, add_lora(opened_fresh("2b", "model"), lora))
    assert second[0] > without[0], "the LoRA is copied too"
    assert first[1] == second[1] == results


def test_switching_loras_applies_each_one(card: Any, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    lora = train_lora(tmp_path, model_folder("2b"))
    adapted: list[Callable[[PipelineHandle], PipelineHandle]] = [
        lambda handle: handle,
        lambda handle: add_lora(handle, lora),
        lambda handle: add_lora(handle, replace(lora, scale=-2.0)),
    ]
    expected = [sampled(add(opened_fresh("2b", "none")), "2b")[0] for add in adapted]
    assert not any(torch.equal(each, expected[0]) for each in expected[1:]), "the LoRAs change the result"
    handle = opened_fresh("2b", "model")
    for index in (0, 1, 2, 0, 2, 1):
        assert torch.equal(sampled(adapted[index](handle), "2b")[0], expected[index]), index


def test_no_host_copies_are_kept_when_main_memory_is_short(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results, handle = results_of(card, "2b"), opened_fresh("2b", "model")
    monkeypatch.setattr(placement, "main_memory", lambda: DeviceMemory(10, handle.store._unread()))
    found = copied(card, handle)
    assert {*handle.store.loaded()} == {"transformer", "vae"}, "the text encoder is read again"
    others = sum(placement.bytes_of(component.module) for component in handle.store.components.values())
    assert [to_host - results for _, to_host in found] == [others, others]


def test_sequential_offload_returns_weights_to_the_same_memory() -> None:
    handle, at_rest = opened_fresh("2b", "sequential"), []
    for _ in range(2):
        frames(handle)
        modules = [handle.store.components[name].module for name in ("text_encoder", "transformer")]
        at_rest.append([tensor.data_ptr() for module in modules for tensor in tensors_of(module)])
    assert at_rest[0] == at_rest[1]


def replaced(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)


def replaced_often(layer: Any) -> None:
    """Replace data until the allocator reuses the first storage, if it does."""
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
def test_changed_weights_are_copied_back(change: str) -> None:
    layer: Any = nn.Conv2d(4, 4, 3).requires_grad_(False)
    layer.register_buffer("table", torch.arange(4.0))
    for _ in range(2):
        move(layer, CUDA)
        with torch.no_grad():
            CHANGES[change](layer)
        expected = {name: tensor.cpu() for name, tensor in layer.state_dict().items()}
        strides = layer.weight.stride()
        move(layer, HOST)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())
        assert layer.weight.dtype == expected["weight"].dtype and layer.weight.stride() == strides
    assert all(tensor not in placement._HOST_COPIES for tensor in tensors_of(layer))
