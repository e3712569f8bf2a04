"""Descriptions of the published variants: of published size, recognised by config, and built without memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.insight.vram_estimate import PUBLISHED
from comfyui_onediff_guard.pipelines.models.folder import family_of, open_model
from comfyui_onediff_guard.pipelines.small_files import fields_of
from comfyui_onediff_guard.precision.dtypes import DTYPES

# Exact numbers of parameters of the denoiser, the encoder and the VAE, so that no size is wrong by accident. Model
# cards, papers and bytes of published files give them in billions, and these are within 2 % of that.
T5_XXL, UMT5_XXL, GLM_4_9B, CLIP_VIT_H = 4762310656, 5680910336, 8779194368, 632076800  # GLM's without its last layer
COGVIDEOX_VAE, COGVIEW_VAE, SVD_VAE, WAN_VAE, WAN_22_VAE = 215583907, 406100643, 97742847, 126892531, 704688668
PARAMETERS = {
    "CogVideoX-2B": (1693783872, T5_XXL, COGVIDEOX_VAE),
    "CogVideoX-5B": (5570283072, T5_XXL, COGVIDEOX_VAE),
    "CogVideoX-5B-I2V": (5570479680, T5_XXL, COGVIDEOX_VAE),
    "CogVideoX-1.5-5B": (5570676352, T5_XXL, COGVIDEOX_VAE),
    "CogVideoX-1.5-5B-I2V": (5571594880, T5_XXL, COGVIDEOX_VAE),
    "CogView3-Plus-3B": (2848836672, T5_XXL, COGVIEW_VAE),
    "CogView4-6B": (6369118272, GLM_4_9B, COGVIEW_VAE),
    "SVD": (1524623082, CLIP_VIT_H, SVD_VAE),
    "SVD-XT": (1524623082, CLIP_VIT_H, SVD_VAE),
    "SVD-XT 1.1": (1524623082, CLIP_VIT_H, SVD_VAE),
    "Wan2.1-T2V-1.3B": (1418996800, UMT5_XXL, WAN_VAE),
    "Wan2.1-T2V-14B": (14288491584, UMT5_XXL, WAN_VAE),
    "Wan2.2-TI2V-5B": (4999787712, UMT5_XXL, WAN_22_VAE),
    "Wan2.2-T2V-A14B": (14288491584, UMT5_XXL, WAN_VAE),
}


def test_every_variant_is_described() -> None:
    assert PUBLISHED.keys() == VARIANTS.keys() == PARAMETERS.keys()
    for name, published in PUBLISHED.items():
        assert VARIANTS[name] in published.family.variants
        assert {*published.configs} == {*published.family.weighted}
        published.family.options.model_validate(dict(published.options))


@pytest.mark.parametrize("name", PUBLISHED)
def test_variant_has_published_size_and_takes_no_memory(name: str) -> None:
    family, configs, _ = PUBLISHED[name]
    denoiser, encoder, vae = PARAMETERS[name]
    for component, config in configs.items():
        module: Any = family.components[component].on_meta(config, torch.float16)
        parameters = {"vae": vae, **dict.fromkeys(family.denoisers, denoiser)}.get(component, encoder)
        assert sum(weight.numel() for weight in module.parameters()) == parameters
        assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"meta"}
        if component == family.denoiser:
            known = family.variant(module.config)
            assert known == name.removesuffix(" 1.1"), "SVD-XT 1.1's config is SVD-XT's"
            assert all(module.config[field] == value for field, value in VARIANTS[name].sizes.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_fields_of_variant_are_accepted_in_folder(name: str) -> None:
    family, configs, _ = PUBLISHED[name]
    for component, config in configs.items():
        spec = family.components[component]
        assert fields_of(spec, spec.classes[0], config) == config


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["2b", "5b-i2v", "1.5-i2v", "cogview3", "cogview4", "svd", "wan", "wan-ti2v"])
def test_built_component_has_shapes_and_dtypes_of_loaded_one(
    model_folder: Callable[..., Path], variant: str, dtype: str
) -> None:
    folder = model_folder(variant)
    model = open_model(folder, family_of(folder))
    for name in model.family.weighted:
        config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        built = model.family.components[name].on_meta(config, DTYPES[dtype])
        loaded = model.component(name, DTYPES[dtype])
        assert tensors(built) == tensors(loaded)


def tensors(module: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named}
