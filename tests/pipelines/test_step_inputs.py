"""Inputs of a step and shapes of latents, as families define them, against what diffusers' pipelines pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.insight.vram_estimate import PUBLISHED
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.activation_estimate import counting
from comfyui_onediff_guard.precision.shallow_copy import reporting, with_forward
from small_runs import opened, start_image
from torch.utils import _pytree as pytree

Shapes = dict[str, list[tuple[int, ...]]]
SIZES = {
    "2b": [(64, 48, 5), (96, 64, 9)],
    "5b": [(64, 48, 5), (96, 64, 9)],
    "1.5": [(64, 48, 5), (80, 64, 9)],  # 2 frames of latents, and 3, which are padded to 4
    "5b-i2v": [(96, 64, 9)],
    "1.5-i2v": [(64, 48, 5), (80, 64, 9)],
    "cogview3": [(64, 96, 1), (128, 64, 1)],
    "cogview4": [(64, 96, 1), (128, 64, 1)],
    "svd": [(64, 128, 2), (128, 64, 3)],
    "wan": [(64, 48, 5), (80, 64, 9)],
    "wan-ti2v": [(64, 96, 5), (96, 160, 9)],
    "wan-two": [(64, 48, 5)],
}


@pytest.mark.parametrize(
    ("variant", "size"), [pytest.param(v, size, id=f"{v}-{size}") for v, sizes in SIZES.items() for size in sizes]
)
def test_inputs_of_step_match_definition_of_family(variant: str, size: tuple[int, int, int]) -> None:
    handle = opened(variant)
    family, model = handle.family, handle.store.model
    calls, latents = sampled(handle, *size)
    shape = family.layout.latents_shape(model.vae_config, *size)
    assert latents.shape == shape
    for name, (call, *_) in calls.items():
        config: Any = handle.store.module(name, "fp32").config
        inputs = family.step_inputs(config, shape, model.options)
        assert shapes_of(inputs) == shapes_of(call)
        tensors = pytree.tree_leaves(inputs)
        assert {(tensor.device.type, tensor.dtype) for tensor in tensors} == {("meta", torch.float32)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_output_of_published_denoiser_fits_latents_to_decode(name: str) -> None:
    family, configs, options = PUBLISHED[name]
    built: list[Any] = [family.components[part].on_meta(configs[part]) for part in (family.denoiser, "vae")]
    config, vae_config = (module.config for module in built)
    size = family.usual_size(config, family.layout.spatial(vae_config))
    shape = family.layout.latents_shape(vae_config, *size)
    inputs = family.step_inputs(config, shape, options)
    with counting():
        (output,) = built[0](**inputs, return_dict=False)
    made, channels = inputs[family.denoiser_inputs[0]].numel() // config.in_channels, family.layout.channels(vae_config)
    assert output.numel() == made * channels >= len(output) * torch.Size(shape).numel(), "1.5's is padded"


def sampled(
    handle: PipelineHandle, width: int, height: int, frames: int
) -> tuple[Mapping[str, list[dict[str, Any]]], torch.Tensor]:
    """Arguments of each denoiser's calls, and the latents."""
    calls: dict[str, list[dict[str, Any]]] = {}

    def recording(stage: Any) -> torch.nn.Module:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(stage.module.forward).bind(*args, **kwargs)
            calls.setdefault(stage.name, []).append(bound.arguments)
            return stage.module(*args, **kwargs)

        return reporting(with_forward(stage.module, recorded), dtype=torch.float32, device=torch.device("cpu"))

    family, config = handle.family, handle.store.model.denoiser_config
    rule = family.prompt
    embeddings = torch.zeros(1, rule.tokens(config), rule.channels(config)) if rule else None
    start = start_image(handle, width, height)
    settings = SampleSettings(width, height, steps=2, seed=3, frames=frames, guidance_scale=5.0)
    latents, _ = sample(handle, embeddings, embeddings, settings, **start, denoiser=recording)
    assert {*calls} == {*family.denoisers}
    return calls, latents


def shapes_of(inputs: Mapping[str, Any]) -> Shapes:
    """The shapes of the tensors in each argument that has any."""
    found = {
        name: [tuple(leaf.shape) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        for name, value in inputs.items()
    }
    return {name: shapes for name, shapes in found.items() if shapes}
