"""Each component is on the GPU when it is called, even if it was evicted for another before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from generations import Generation
from small_runs import opened


class RoomForOne(PlainPlacement):
    """A GPU on which one component evicts another, as in a ComfyUI whose smart memory is disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.on_gpu = ""
        self.arrived: Counter[str] = Counter()

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        super().to_device(name, module, beside)
        self.arrived[name] += name != self.on_gpu
        self.on_gpu = name

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        super().to_host(name, module)
        self.on_gpu = "" if self.on_gpu == name else self.on_gpu


def watched(model: str) -> tuple[PipelineHandle, RoomForOne, set[str]]:
    """The handle, its placement, and the components that are called while not on the GPU, filled during runs."""
    placement, misplaced = RoomForOne(), set[str]()
    handle = opened(model, precision="bf16", placement=placement)

    def called(name: str) -> Callable[..., None]:
        return lambda *_: misplaced.update({name} - {placement.on_gpu})

    checks = handle.store._checked

    def with_hooks(name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        found = checks(name, module, dtype)
        for layer in module.modules():
            layer.register_forward_pre_hook(called(name))
        return found

    handle.store._checked = with_hooks
    return handle, placement, misplaced


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "cogview4", "svd", "wan", "wan-two"])
def test_each_component_is_on_gpu_when_it_is_called(model: str) -> None:
    handle, placement, misplaced = watched(model)
    for _ in range(2):
        handle.store.prompts.clear()
        Generation(handle, model).whole()
    assert not misplaced
    used = Counter(dict.fromkeys(handle.store.model.weights, 1))
    used["vae"] += handle.family.takes_image  # to encode, and to decode
    assert placement.arrived == used + used, "no more moves than uses"
