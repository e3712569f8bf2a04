"""fp32 reruns of real model classes: bit-equal to module.float(), whole, tiled and sliced; with exact_fp32 no stage
uses TF32."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import shared_models
import torch
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from device_matrix import Leg, ran
from small_runs import opened
from torch.utils._python_dispatch import TorchDispatchMode


def component(name, dtype, variant="5b") -> Any:
    """The module in half, and a float32 copy of it."""
    module = opened(variant, precision=dtype).store.module(name, dtype)
    return module, copy.deepcopy(module).float()


def hooks(module):
    return [[*m._forward_hooks, *m._forward_pre_hooks] for m in module.modules()]


def assert_bit_equal(found, expected, module, dtype, before=None):
    """before: hooks that a library has added, as transformers does on text encoders."""
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert next(module.parameters()).dtype == DTYPES[dtype]
    assert hooks(module) == (before or [[] for _ in module.modules()])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("variant", ["2b", "5b", "1.5"])
def test_denoiser_rerun_is_bit_equal_to_float(dtype, variant):
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
def test_rerun_of_text_encoder_with_wo_in_fp32_is_bit_equal_to_float(dtype):
    module, reference = component("text_encoder", dtype)
    tokens, before = torch.randint(0, 50, (1, 20)), hooks(module)
    with torch.no_grad():
        assert_bit_equal(run_in_fp32(module, tokens)[0], reference(tokens)[0], module, dtype, before)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("mode", ["whole", "tiled", "sliced"])
def test_vae_rerun_is_bit_equal_to_float(dtype, mode):
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


PRODUCTS = {torch.ops.aten.convolution, torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}
LEG = Leg("fp32", "fp32", exact_fp32=True, steps=2, sizes="small")


class Tf32(TorchDispatchMode):
    """Counts the convolutions and products by whether they may take TF32."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            switch = torch.backends.cudnn if func.overloadpacket == torch.ops.aten.convolution else None
            allowed = switch.allow_tf32 if switch else torch.get_float32_matmul_precision() != "highest"
            self.seen[func.overloadpacket.__name__, allowed] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "svd", "wan"])
def test_exact_fp32_allows_tf32_in_no_stage(model):
    with Tf32() as settings:
        list(ran(shared_models.model_folder(model, "none"), torch.device("cpu"), LEG))
    assert [each for each in settings.seen if each[1]] == []
    assert settings.seen["convolution", False] and settings.seen["addmm", False]
