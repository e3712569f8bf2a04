"""A run of a small model of each family, at a size at which it takes more beside its weights than they are."""

from __future__ import annotations

from typing import Any

import torch
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample

SIZES = {"2b": (128, 96, 9), "5b-i2v": (96, 64, 9), "cogview3": (128, 128, 1), "svd": (128, 128, 4), "wan": (96, 96, 5)}


def sampled(handle: PipelineHandle, model: str, *, steps: int = 2, **more: Any) -> tuple[torch.Tensor, Any]:
    width, height, frames = SIZES[model]
    positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0] if handle.family.prompt else (None, None)
    start = (
        {
            "image": fitted(
                torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(2)), width, height, "crop"
            )[0]
        }
        if handle.family.takes_image
        else {}
    )
    settings = SampleSettings(width, height, steps=steps, seed=3, frames=frames, guidance_scale=5.0)
    return sample(handle, positive, negative, settings, **start, **more)
