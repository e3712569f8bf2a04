"""NaN Guard (native) on ComfyUI's video VAEs, many of which decode in chunks into a given output tensor.

ComfyUI's VAE class makes each of them from a checkpoint's weights, as its loader does, at smaller sizes than
published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import guard_quantised
import pytest
import torch
from guard_vae import guarded
from in_comfyui import difference, texts
from in_comfyui import guarded as guarded_model
from native_models import CARD, VAE_SETTINGS, make_model, random_weights, sample

SD = import_module("comfy.sd")
ARGS = import_module("comfy.cli_args").args
CHUNKED = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
MIDDLE = "decoder.transformer_blocks.0.attn.to_qkv.weight"  # MiniMax H3's; only the v part of a row overflows


@dataclass(frozen=True)
class Kind:
    module: str
    build: Callable[[Any], torch.nn.Module]  # from the module
    smaller: Mapping[str, Mapping[str, Any]]  # name of a class in the module → its arguments
    hot: Mapping[str, float]  # weight → factor that makes fp16 overflow, in decoder and encoder
    hidden: Mapping[str, float] = field(default_factory=dict)  # the same, but the plain result is finite
    frames: int = 2  # of the latents
    images: int = 5  # to encode
    metadata: Mapping[str, str] | None = None


def _hunyuan15(_: Any) -> torch.nn.Module:
    parameters: dict[str, Any] = {"in_channels": 3, "out_channels": 3, "z_channels": 32, "block_out_channels": []}
    parameters |= {"num_res_blocks": 1, "ffactor_spatial": 16, "ffactor_temporal": 4}
    where = "comfy.ldm.hunyuan_video.vae_refiner"
    return SD.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
        encoder_config={"target": f"{where}.Encoder", "params": parameters},
        decoder_config={"target": f"{where}.Decoder", "params": parameters},
    )


LTXV: dict[str, Any] = {"dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "patch_size": 4}
LTXV |= {"norm_layer": "pixel_norm", "latent_log_var": "uniform", "causal_decoder": False}
LTXV |= {"encoder_base_channels": 16, "decoder_base_channels": 16}
LTXV["blocks"] = [["compress_all", 1], ["compress_all", 1], ["compress_all", 1], ["res_x", 1]]
HUNYUAN = VAE_SETTINGS | {"z_channels": 16, "conv3d": True, "time_compress": 4}
KINDS = {
    "cogvideox": Kind(
        "comfy.ldm.cogvideo.vae",
        lambda module: module.AutoencoderKLCogVideoX(),
        {"AutoencoderKLCogVideoX": {"block_out_channels": (32,) * 4, "layers_per_block": 1, "latent_channels": 16}},
        {"decoder.conv_in.conv.weight": 1e5, "encoder.conv_in.conv.weight": 1e5},
    ),
    "ltxv": Kind(
        CHUNKED,
        lambda module: module.VideoVAE(config=LTXV),
        {},
        {"decoder.up_blocks.0.res_blocks.0.conv1.conv.weight": 1e5, "encoder.conv_in.conv.weight": 1e5},
        {"decoder.conv_in.conv.weight": 1e4},
        images=9,
        metadata={"config": json.dumps({"vae": LTXV})},
    ),
    "minimax_h3": Kind(
        "comfy.ldm.minimax.vae",
        lambda module: module.MiniMaxH3VideoVAE(),
        {
            "ViT3DDecoder": {"num_layers": 1, "heads": 2, "dim_head": 64},
            "MiniMaxH3VideoVAE": {"ch": 32, "ch_mult": (1,) * 6, "num_res_blocks": 1},
        },
        {"decoder.transformer_blocks.0.ff.w1.weight": 3e3, "encoder.conv_in.weight": 1e5},
        {MIDDLE: 5e4},
        frames=7,  # two chunks
    ),
    "wan2.1": Kind(
        "comfy.ldm.wan.vae",
        lambda module: module.WanVAE(temperal_downsample=[False, True, True]),
        {"WanVAE": {"dim": 8, "z_dim": 16, "num_res_blocks": 1}},
        {"decoder.conv1.weight": 1e5, "encoder.conv1.weight": 1e5},
    ),
    "wan2.2": Kind(
        "comfy.ldm.wan.vae2_2",
        lambda module: module.WanVAE(temperal_downsample=[False, True, True]),
        {"WanVAE": {"dim": 8, "dec_dim": 8, "z_dim": 48, "num_res_blocks": 1}},
        {"decoder.conv1.weight": 1e5, "encoder.conv1.weight": 1e5},
        {"decoder.conv1.weight": 1.4e4},
    ),
    "hunyuan_video": Kind(
        "comfy.sd",
        lambda module: module.AutoencoderKL(ddconfig=HUNYUAN, embed_dim=16),
        {"AutoencoderKL": {"ddconfig": HUNYUAN}},
        {"decoder.conv_in.conv.weight": 1e5, "encoder.conv_in.conv.weight": 1e5},
    ),
    "hunyuan_video1.5": Kind(
        "comfy.ldm.hunyuan_video.vae_refiner",
        _hunyuan15,
        {
            "Encoder": {"block_out_channels": [64] * 5, "num_res_blocks": 1},
            "Decoder": {"block_out_channels": [32] * 5, "num_res_blocks": 1},
        },
        {"decoder.conv_in.conv.weight": 1e5, "encoder.conv_in.conv.weight": 1e5},
    ),
}
KINDS = {
    name: kind for name, kind in KINDS.items() if find_spec(kind.module.rpartition(".")[0]) and find_spec(kind.module)
}


def decode(vae: Any, kind: Kind) -> torch.Tensor:
    shape = (1, vae.latent_channels, kind.frames, 2, 2)
    with torch.inference_mode():
        return vae.decode(torch.randn(shape, generator=torch.Generator().manual_seed(3)).half().float())


def encode(vae: Any, kind: Kind) -> torch.Tensor:
    pixels = torch.randint(257, (kind.images, 32, 32, 3), generator=torch.Generator().manual_seed(4)) / 256
    with torch.inference_mode():
        return vae.encode(pixels)


@pytest.fixture(autouse=True)
def _in_chunks() -> Iterator[None]:
    """Set a small chunk size in bytes for LTXV's decoder."""
    with patch.object(import_module(CHUNKED), "get_max_chunk_size", lambda _: 4096, create=True):
        yield


@pytest.mark.parametrize("call", [decode, encode])
@pytest.mark.parametrize("name", KINDS)
def test_healthy_vae_is_bit_equal_with_guard(name: str, call: Any) -> None:
    kind = KINDS[name]
    vae = make(kind, torch.float16)
    plain, made = (call(each, kind) for each in (vae, guarded(vae)))
    assert plain.isfinite().all() and plain.std() > 0 and torch.equal(plain, made)
    assert "1 part, fine" in texts[-1]


@pytest.mark.parametrize("call", [decode, encode])
@pytest.mark.parametrize("name", KINDS)
def test_overflowing_vae_is_recomputed_near_fp32(name: str, call: Any) -> None:
    kind = KINDS[name]
    vae = make(kind, torch.float16, kind.hot)
    plain, exact, made = (call(each, kind) for each in (vae, in_fp32(vae, kind), guarded(vae)))
    assert plain.isnan().any()
    assert exact.std() > 0 and difference(made, exact) <= 1e-5
    assert "1 part, 1 recomputed in fp32" in texts[-1]
    protected = call(guarded(vae, precision="fp16"), kind)
    assert (protected - exact).norm() <= 5e-3 * exact.norm()
    assert "; overflow protection; 1 part, fine" in texts[-1]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.hidden])
def test_hidden_overflow_is_recomputed_near_fp32(name: str) -> None:
    kind = KINDS[name]
    vae = make(kind, torch.float16, kind.hidden)
    plain, exact, made = (decode(each, kind) for each in (vae, in_fp32(vae, kind), guarded(vae)))
    assert plain.isfinite().all() and difference(plain, exact) > 0.05
    assert difference(made, exact) <= 1e-5
    assert "1 part, 1 recomputed in fp32" in texts[-1]


@pytest.mark.skipif(not hasattr(ARGS, "fp16_intermediates"), reason="this ComfyUI keeps outputs in float32")
@pytest.mark.parametrize("name", [name for name in ("ltxv", "minimax_h3") if name in KINDS])
def test_rerun_with_fp16_intermediates_is_bit_equal_to_fp32(name: str) -> None:
    kind = KINDS[name]
    vae = make(kind, torch.float16, kind.hot)
    with patch.object(ARGS, "fp16_intermediates", True):
        plain, made, exact = (decode(each, kind) for each in (vae, guarded(vae), in_fp32(vae, kind)))
    assert plain.isnan().any() and made.dtype is exact.dtype is torch.float16
    assert torch.equal(made, exact)


@pytest.mark.skipif("minimax_h3" not in KINDS, reason="this ComfyUI has no such VAE")
@pytest.mark.parametrize("hot", [False, True])
def test_quantised_decoder_is_recomputed_from_stored_weights(hot: bool) -> None:
    """MiniMax H3's decoder has checkpoints in int8."""
    rotated, kind = guard_quantised.FORMATS["int8, rotated"], KINDS["minimax_h3"]
    stored = make(kind, torch.float16, kind.hot if hot else {}).first_stage_model.state_dict()
    dequantised = dict(stored)
    for name in [name for name in stored if "transformer_blocks" in name and stored[name].ndim == 2]:
        tensors, dequantised[name] = guard_quantised.written(rotated, stored.pop(name), {})
        stored |= {f"{name.removesuffix('.weight')}.{key}": tensor for key, tensor in tensors.items()}
    vae = make(kind, torch.float16, stored=stored)
    plain, exact, made = (decode(each, kind) for each in (vae, in_fp32(vae, kind, dequantised), guarded(vae)))
    if not hot:
        assert torch.equal(made, plain)
        return
    assert plain.isnan().any() and difference(made, exact) <= 1e-5
    assert "the rerun used the stored int8_tensorwise weights" in texts[-1]


def test_guarded_model_runs_no_step_again_for_guarded_vae_inside_it() -> None:
    """Uni3C's patch encodes its video in the first step. The encoder's norms clip in fp16, and are recomputed."""
    kind = KINDS["wan2.1"]
    vae = guarded(make(kind, torch.float16, kind.hot))

    def encoding() -> Any:
        model, latents = make_model("sd15"), list[torch.Tensor]()

        def patch(h: torch.Tensor, options: Any) -> torch.Tensor:
            if not latents:
                latents.append(encode(vae, kind))
            return h + latents[0].mean().to(h.dtype)

        model.set_model_input_block_patch(patch)
        return model

    plain = sample(encoding())
    assert plain.isfinite().all() and "1 part, 1 recomputed in fp32" in texts[-1]
    assert torch.equal(sample(guarded_model(encoding())), plain)
    assert texts[-1].split("\n")[0].endswith("3 steps, all fine.")


@torch.inference_mode()
def make(
    kind: Kind, dtype: torch.dtype, hot: Mapping[str, float] | None = None, *, stored: dict[str, Any] | None = None
) -> Any:
    """Make ComfyUI's VAE with random weights, or with the stored ones."""
    module = import_module(kind.module)
    with ExitStack() as sizes:
        for name, given in kind.smaller.items():
            smaller = partial(_called_with, getattr(module, name), given)
            sizes.enter_context(patch.object(module, name, smaller))
        if stored is None:
            stored = random_weights(kind.build(module), hot or {})
        return SD.VAE(sd=dict(stored), device=CARD, dtype=dtype, metadata=kind.metadata)


def in_fp32(vae: Any, kind: Kind, stored: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return a VAE in fp32 with the same weights, or the stored ones, and the same rounded buffers."""
    held: Mapping[str, torch.Tensor] = stored or vae.first_stage_model.state_dict()
    twin = make(kind, torch.float32, stored={name: weight.float() for name, weight in held.items()})
    for name, buffer in vae.first_stage_model.named_buffers():
        where, _, own = name.rpartition(".")
        twin.first_stage_model.get_submodule(where)._buffers[own] = buffer.float()
    return twin


def _called_with(cls: Any, given: Mapping[str, Any], *args: Any, **named: Any) -> Any:
    return cls(*args, **{**named, **given})
