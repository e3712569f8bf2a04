"""Small models, each built for one mechanism by which diffusion models come out black."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.headless.small_model import new_folder, small_text_encoder, train_tokenizer
from comfyui_onediff_guard.pipelines.families import COGVIDEOX, FamilySpec
from comfyui_onediff_guard.pipelines.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.placement import PlainPlacement
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.policy import Precision

FP16_MAX = 65504


@pytest.fixture
def on_card() -> Callable[..., PipelineHandle]:
    """on_card(folder, "sm75", precision) → a pipeline that takes this CPU for that card."""

    def open_folder(folder: Path, card: str, precision: str = "auto", family: FamilySpec = COGVIDEOX):
        options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
        handle = load(folder, family, precision=Precision(precision), **options)
        return replace(handle, architecture=arch.named(card))

    return open_folder


@pytest.fixture
def changed(model_folder, tmp_path) -> Callable[..., Path]:
    """changed(folder, component, class, change) → a copy whose component's float32 weights `change` altered."""

    def copy(folder: Path, component: str, kind: Any, change: Callable[[Any], None]) -> Path:
        target = shutil.copytree(folder, tmp_path / f"{folder.name}-{component}")
        module = kind.from_pretrained(target / component)
        with torch.no_grad():
            change(module)
        shutil.rmtree(target / component)
        module.save_pretrained(target / component)
        return target

    return copy


@pytest.fixture(scope="session")
def cogview3_folder(tmp_path_factory) -> Path:
    """A healthy small CogView3-Plus folder."""
    from diffusers import (
        AutoencoderKL,
        CogVideoXDDIMScheduler,
        CogView3PlusPipeline,
        CogView3PlusTransformer2DModel,
    )

    folder = tmp_path_factory.mktemp("cogview") / "small-cogview3"
    with new_folder(folder) as temporary, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder = small_text_encoder()
        transformer = CogView3PlusTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=4,
            text_embed_dim=text_encoder.config.d_model,
            time_embed_dim=32,
            condition_dim=8,
            pos_embed_max_size=16,
            sample_size=16,
        )
        CogView3PlusPipeline(
            tokenizer=train_tokenizer(temporary / "trained"),
            text_encoder=text_encoder,
            vae=AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=4),
            transformer=transformer,
            scheduler=CogVideoXDDIMScheduler(),
        ).save_pretrained(temporary)
        shutil.rmtree(temporary / "trained")
    return folder


def cogview3_call(denoiser: torch.nn.Module) -> dict[str, Any]:
    """Arguments of one step: a guided batch of two 16×16 latents."""
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([[128.0, 128.0]] * 2)
    return {
        "hidden_states": torch.randn(2, 4, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, 32, generator=generator),
        "timestep": torch.tensor([500, 500]),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(2, 2),
        "return_dict": False,
    }
