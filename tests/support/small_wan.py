"""Builders of small Wan 2.1 and 2.2 folders: real classes, published file layout and settings, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.demo.small_model import STREAM_PEAK, Overflow, draw_weights, new_folder, save
from comfyui_onediff_guard.demo.small_tokenizer import train_tokenizer
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel


def build_wan(folder: Path, *, overflow: Overflow = "none", ti2v: bool = False, two: bool = False) -> Path:
    """Write a small Wan pipeline to `folder`, which must not exist yet, and return `folder`.

    overflow: "stream" makes the feed-forward of one block write |x| of about 5e5 into the residual stream.
    ti2v: Wan 2.2 5B, with its VAE and a timestep per token; else Wan 2.1 1.3B.
    two: Wan 2.2 A14B, with a second transformer for timesteps below 0.875, to which `overflow` applies.
    """
    with new_folder(folder) as temporary, torch.random.fork_rng(devices=[]):
        tokenizer = train_tokenizer(temporary / "tokenizer")
        torch.manual_seed(0)
        encoder = draw_weights(
            UMT5EncoderModel(
                UMT5Config(
                    vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                    feed_forward_proj="gated-gelu", dropout_rate=0.0,
                )
            )
        )  # fmt: skip
        torch.manual_seed(1)
        transformer = _transformer(48 if ti2v else 16)
        second = _transformer(16) if two else None
        if overflow == "stream":
            _overflow_stream(second or transformer)
        torch.manual_seed(2)
        pipeline = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=encoder,
            transformer=transformer,
            transformer_2=second,
            boundary_ratio=0.875 if two else None,
            vae=_vae(ti2v),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0 if ti2v else 3.0
            ),
            expand_timesteps=ti2v,
        )
        save(pipeline, temporary, torch.float32)
    return folder


def _transformer(channels: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=channels,
        text_dim=32,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
    ).eval()


def _vae(ti2v: bool) -> AutoencoderKLWan:
    sizes: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    if ti2v:
        numbers = [0.01 * number for number in range(48)]
        sizes |= {"z_dim": 48, "decoder_base_dim": 8, "in_channels": 12, "out_channels": 12, "patch_size": 2}
        sizes |= {"is_residual": True, "scale_factor_spatial": 16, "scale_factor_temporal": 4}
        sizes |= {"latents_mean": numbers, "latents_std": [1 + number for number in numbers]}
    return AutoencoderKLWan(**sizes).eval()


def _overflow_stream(transformer: Any) -> None:
    """Scale the first block's feed-forward output until |residual stream| after it is STREAM_PEAK."""
    block = transformer.blocks[0]
    peaks: list[float] = []
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, transformer.config.in_channels, 2, 8, 8, generator=generator)
    text = torch.randn(1, 512, transformer.config.text_dim, generator=generator)
    with torch.no_grad():
        block.ffn.net[0].proj.weight.mul_(8.0)
        block.scale_shift_table[0, 5] = 1.0  # a small gate would need a huge weight
        hook = block.register_forward_hook(lambda _block, _given, stream: peaks.append(stream.abs().max().item()))
        for _ in range(2):
            transformer(latents, torch.tensor([500]), text)
            block.ffn.net[2].weight.mul_(STREAM_PEAK / peaks[-1])
        hook.remove()
