"""The fp32 rerun on the real classes: bit-equal to module.float(), whole, tiled and sliced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from small_runs import opened


def component(name, dtype, variant="5b") -> Any:
    """The module in half, and a float32 copy of it."""
    module = opened(variant, precision=dtype).store.module(name, dtype)
    return module, copy.deepcopy(module).float()


def hooks(module):
    return [[*m._forward_hooks, *m._forward_pre_hooks] for m in module.modules()]


def assert_bit_equal(found, expected, module, dtype, before=None):
    """before: hooks that a library put there, as transformers does on text encoders."""
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert next(module.parameters()).dtype == DTYPES[dtype]
    assert hooks(module) == (before or [[] for _ in module.modules()])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("variant", ["2b", "5b", "1.5"])
def test_denoiser(dtype, variant):
    module, reference = component("transformer", dtype, variant)
    torch.manual_seed(1)
    config, frames = module.config, 4
    call = {
        "hidden_states": torch.randn(2, frames, config.in_channels, 6, 8, dtype=DTYPES[dtype]),
        "encoder_hidden_states": torch.randn(2, config.max_text_seq_length, config.text_embed_dim, dtype=DTYPES[dtype]),
        "timestep": torch.tensor([700, 700]),
    }
    if config.use_rotary_positional_embeddings:
        positions = (frames // (config.patch_size_t or 1)) * 3 * 4
        call["image_rotary_emb"] = tuple(torch.rand(2, positions, config.attention_head_dim))
    upcast = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in call.items()}
    with torch.no_grad():
        assert_bit_equal(run_in_fp32(module, **call).sample, reference(**upcast).sample, module, dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_text_encoder_whose_wo_is_in_fp32(dtype):
    module, reference = component("text_encoder", dtype)
    tokens, before = torch.randint(0, 50, (1, 20)), hooks(module)
    with torch.no_grad():
        assert_bit_equal(run_in_fp32(module, tokens)[0], reference(tokens)[0], module, dtype, before)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("mode", ["whole", "tiled", "sliced"])
def test_vae(dtype, mode):
    module, reference = component("vae", dtype)
    for vae in (module, reference):
        vae.use_tiling, vae.use_slicing = mode == "tiled", mode == "sliced"
    latents = torch.randn(2, 16, 3, 12, 16, dtype=DTYPES[dtype])
    with torch.no_grad():
        found, expected = run_in_fp32(module.decode, latents).sample, reference.decode(latents.float()).sample
        assert_bit_equal(found, expected, module, dtype)
        video = torch.randn(1, 3, 5, 48, 64, dtype=DTYPES[dtype])
        found, expected = run_in_fp32(module.encode, video), reference.encode(video.float())
        assert_bit_equal(found.latent_dist.parameters, expected.latent_dist.parameters, module, dtype)
