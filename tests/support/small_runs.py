"""Run small models of every family, from folder to frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared_models
import torch
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from PIL import Image

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SIZES = {"2b": (128, 96, 9), "5b-i2v": (96, 64, 9), "cogview3": (128, 128, 1), "svd": (128, 128, 4), "wan": (96, 96, 5)}
# at these sizes activations need more memory than weights
SMALL = (64, 48, 9)  # for CogVideoX and Wan, if that does not matter


def opened(
    model: str | Path,
    offload: str = "none",
    precision: str = "fp32",
    overflow: str = "none",
    *,
    device: torch.device | None = None,
    **options: Any,
) -> PipelineHandle:
    """A pipeline of a small model, by its name or its folder.

    device: by default PyTorch's, which can be the second device. options: of `load`.
    """
    folder = model if isinstance(model, Path) else shared_models.model_folder(model, overflow)
    options = {"backend": "eager", "placement": PlainPlacement(device), **options}
    return load(folder, family_of(folder), precision=Precision(precision), offload=offload, **options)


def opened_fresh(*args: Any, **options: Any) -> PipelineHandle:
    """A pipeline with a new store."""
    stores._STORES.clear()
    return opened(*args, **options)


def picture(width: int, height: int, seed: int = 2) -> Image.Image:
    image = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(seed))
    return fitted(image, width, height, "crop")[0]


def start_image(handle: PipelineHandle, width: int, height: int) -> dict[str, Any]:
    """The start image of the family, as an argument of `sample`."""
    return {"image": picture(width, height)} if handle.family.takes_image else {}


def prompts(handle: PipelineHandle) -> Any:
    """(positive, negative); (None, None) for a family without prompts."""
    return encode_prompts(handle, ["a red kite", "grey"])[0] if handle.family.prompt else (None, None)


def sampled(
    handle: PipelineHandle, size: str | tuple[int, int, int], *, steps: int = 2, seed: int = 3, **more: Any
) -> tuple[torch.Tensor, Any]:
    """(latents, report). size: width, height and frames, or a model's name for its size in SIZES."""
    width, height, frames = SIZES[size] if isinstance(size, str) else size
    positive, negative = prompts(handle)
    settings = SampleSettings(width, height, steps=steps, seed=seed, frames=frames, guidance_scale=5.0)
    return sample(handle, positive, negative, settings, **start_image(handle, width, height), **more)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative error by norm."""
    return float((found - right).norm() / right.norm())


def frames(
    handle: PipelineHandle,
    size: tuple[int, int, int] | None = None,
    *,
    steps: int = 2,
    seed: int = 3,
    **more: Any,
) -> torch.Tensor:
    """A whole run that encodes its prompt again. size: width, height and frames; small by default."""
    handle.store.prompts.clear()
    positive, negative = prompts(handle)
    width, height, count = size or ((64, 48, 5) if "CogVideoX" in handle.family.name else (64, 64, 1))
    settings = SampleSettings(width, height, steps=steps, seed=seed, frames=count, guidance_scale=5.0)
    latents, _ = sample(handle, positive, negative, settings, **start_image(handle, width, height), **more)
    return decode(handle, latents)[0].cpu()
