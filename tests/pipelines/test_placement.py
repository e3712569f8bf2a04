"""Each component is on the card when it is called, whatever had to leave for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from test_families import picture

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


def opened(folder: Path) -> tuple[PipelineHandle, RoomForOne, set[str]]:
    """The handle, its card, and the components that are called while they are not there: filled as it runs."""
    placement, elsewhere = RoomForOne(), set[str]()
    options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": placement}
    handle = load(folder, family_of(folder), precision=Precision("bf16"), **options)

    def called(name: str) -> Callable[..., None]:
        return lambda *_: elsewhere.update({name} - {placement.here})

    checks = handle.store._checked

    def watched(name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        found = checks(name, module, dtype)
        for layer in module.modules():
            layer.register_forward_pre_hook(called(name))
        return found

    handle.store._checked = watched
    return handle, placement, elsewhere


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "cogview4", "svd", "wan", "wan-two"])
def test_each_component_is_there_when_it_is_called(model_folder: Callable[..., Path], model: str) -> None:
    handle, placement, elsewhere = opened(model_folder(model))
    family = handle.family
    width, height, frames = SIZES.get(model, (64, 64, 9 if family.layout.counts_frames else 1))
    for _ in range(2):
        handle.store.prompts.clear()
        positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0] if family.prompt else (None, None)
        start = {"image": fitted(picture(), width, height, "crop")[0]} if family.takes_image else {}
        settings = SampleSettings(width, height, steps=2, seed=3, frames=frames, guidance_scale=5.0)
        latents, _ = sample(handle, positive, negative, settings, **start)
        decode(handle, latents)
    assert not elsewhere
    used = Counter(dict.fromkeys(handle.store.model.weights, 1))
    used["vae"] += family.takes_image  # to encode, and to decode
    assert placement.arrived == used + used, "no more moves than uses"
