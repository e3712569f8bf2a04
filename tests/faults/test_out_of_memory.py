"""There is no room for a component that is moved: the run fails, nothing is left halfway, and the next run is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from diffusers.hooks.group_offloading import ModuleGroup
from moving import BEFORE, CARD, CASES, Card, opened, tensors_of, what_is_wrong
from trained_lora import train_lora


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(torch.nn.Module.to)
    monkeypatch.setattr(torch.nn.Module, "to", lambda *args, **kwargs: card.to(*args, **kwargs))
    return card


@pytest.fixture(scope="module")
def lora(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Lora:
    return train_lora(tmp_path_factory.mktemp("loras"), model_folder("2b"))


@pytest.mark.parametrize(("before", "offload"), CASES)
@pytest.mark.parametrize("with_lora", [False, True], ids=["plain", "with a LoRA"])
def test_the_next_run_is_right_whichever_move_failed(
    card: Card, model_folder: Callable[..., Path], lora: Lora, before: str, offload: str, with_lora: bool
) -> None:
    def begun() -> PipelineHandle:
        handle = opened(model_folder("2b"), offload, PlainPlacement(CARD))
        BEFORE[before](handle, lora)
        return add_lora(handle, lora) if with_lora else handle

    assert what_is_wrong(card, begun) == []
    assert card.moves >= 2


@pytest.mark.parametrize(("offload", "step"), [("group", 1), ("sequential", 7)])
def test_the_next_run_is_right_whichever_part_failed(
    card: Card, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, offload: str, step: int
) -> None:
    for module in (handles, offloading, stores):
        monkeypatch.setattr(module, "brings_parts_to", lambda _device: True)
    send_away = ModuleGroup._offload_to_memory
    monkeypatch.setattr(ModuleGroup, "_onload_from_memory", lambda group: onload(card, group))
    monkeypatch.setattr(ModuleGroup, "_offload_to_memory", lambda group: (send_away(group), card.go(tensors_of(group))))
    assert what_is_wrong(card, lambda: opened(model_folder("2b"), offload, PlainPlacement(CARD)), step) == []
    assert card.moves >= 10


def onload(card: Card, group: ModuleGroup) -> None:
    card.arrive(tensors_of(group))
    group._process_tensors_from_modules(None)
