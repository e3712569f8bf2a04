"""Each component is on the card when it is called, whatever had to leave for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from small_runs import opened, sampled

SIZES = {"5b-i2v": (96, 64, 9), "svd": (64, 64, 2)}


class RoomForOne(PlainPlacement):
    """A card on which one component drives out another, as ComfyUI's manager does where smart memory is disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.here = ""
        self.arrived: Counter[str] = Counter()

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        super().to_device(name, module, beside)
        self.arrived[name] += name != self.here
        self.here = name

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        super().to_host(name, module)
        self.here = "" if self.here == name else self.here


def watched(model: str) -> tuple[PipelineHandle, RoomForOne, set[str]]:
    """The handle, its card, and the components that are called while they are not there: filled as it runs."""
    placement, elsewhere = RoomForOne(), set[str]()
    handle = opened(model, precision="bf16", placement=placement)

    def called(name: str) -> Callable[..., None]:
        return lambda *_: elsewhere.update({name} - {placement.here})

    checks = handle.store._checked

    def with_hooks(name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        found = checks(name, module, dtype)
        for layer in module.modules():
            layer.register_forward_pre_hook(called(name))
        return found

    handle.store._checked = with_hooks
    return handle, placement, elsewhere


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "cogview4", "svd", "wan", "wan-two"])
def test_each_component_is_there_when_it_is_called(model: str) -> None:
    handle, placement, elsewhere = watched(model)
    family = handle.family
    size = SIZES.get(model, (64, 64, 9 if family.layout.counts_frames else 1))
    for _ in range(2):
        handle.store.prompts.clear()
        decode(handle, sampled(handle, size)[0])
    assert not elsewhere
    used = Counter(dict.fromkeys(handle.store.model.weights, 1))
    used["vae"] += family.takes_image  # to encode, and to decode
    assert placement.arrived == used + used, "no more moves than uses"
