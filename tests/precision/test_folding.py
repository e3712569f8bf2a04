"""The fold, on the real CogVideoX classes: bit-equal in fp32, finite and near fp32 in fp16."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.pipelines.families import COGVIDEOX as FAMILY
from comfyui_onediff_guard.precision.folding import CannotFold, bits_for, fold, stream_peak
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from diffusers import CogVideoXTransformer3DModel

COGVIDEOX = FAMILY.stream
SMALL = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 3,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "max_text_seq_length": 12,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 9,
}
ROTARY = {"use_rotary_positional_embeddings": True}
VARIANTS = {
    "2B": {},
    "5B": ROTARY,
    "5B-I2V": ROTARY | {"use_learned_positional_embeddings": True, "in_channels": 32},
    "1.5": ROTARY | {"patch_size_t": 2, "patch_bias": False},
    "1.5-I2V": ROTARY | {"patch_size_t": 2, "patch_bias": False, "in_channels": 32, "ofs_embed_dim": 32},
}


def build(variant, *, peak=None):
    """(denoiser in float32, one call's arguments); with `peak`, one block writes about that much into the stream."""
    torch.manual_seed(0)
    denoiser = CogVideoXTransformer3DModel(**SMALL, **VARIANTS[variant]).eval().requires_grad_(False)
    config, frames = denoiser.config, 4 if variant.startswith("1.5") else 3
    if config.use_learned_positional_embeddings:
        torch.nn.init.normal_(denoiser.patch_embed.pos_embedding, std=0.1)
    call = {
        "hidden_states": torch.randn(2, frames, config.in_channels, 8, 12),
        "encoder_hidden_states": torch.randn(2, 12, 32),
        "timestep": torch.tensor([700, 700]),
        "return_dict": False,
    }
    if config.use_rotary_positional_embeddings:
        positions = frames // (config.patch_size_t or 1) * 4 * 6
        angles = torch.rand(positions, 16)
        call["image_rotary_emb"] = (angles.cos(), angles.sin())
    if config.ofs_embed_dim:
        call["ofs"] = torch.full((1,), 2.0)
    if peak:
        block, width = denoiser.transformer_blocks[1], denoiser.config.num_attention_heads * 16
        for gate in (2, 5):  # of the video's and of the text's tokens: the product overflows, not what goes into it
            block.norm2.linear.bias[gate * width : (gate + 1) * width] += 16
        for _ in range(3):
            block.ff.net[2].weight.mul_(peak / stream_peak(denoiser, COGVIDEOX, lambda: denoiser(**call)))
    return denoiser, call


def in_dtype(call, dtype):
    return call | {name: call[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}


@pytest.mark.parametrize("k", [1, 6, 12])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_is_bit_equal_with_and_without_the_fold(variant, k):
    denoiser, call = build(variant)
    state = {name: tensor.clone() for name, tensor in denoiser.state_dict().items()}
    expected = denoiser(**call)[0]
    assert torch.equal(fold(denoiser, COGVIDEOX, k)(**call)[0], expected)
    assert torch.equal(denoiser(**call)[0], expected), "the original is not touched"
    assert all(torch.equal(state[name], tensor) for name, tensor in denoiser.state_dict().items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stream_at_5e5_is_nan_in_fp16_and_four_times_nearer_than_bf16_when_folded(variant):
    denoiser, call = build(variant, peak=5e5)
    peak = stream_peak(denoiser, COGVIDEOX, lambda: denoiser(**call))
    assert 4e5 < peak < 6e5
    expected = denoiser(**call)[0]
    bf16 = denoiser.to(torch.bfloat16)(**in_dtype(call, torch.bfloat16))[0].float()

    denoiser, call = build(variant, peak=5e5)
    half, half_call = denoiser.half(), in_dtype(call, torch.float16)
    assert torch.isnan(half(**half_call)[0]).all()
    folded = fold(half, COGVIDEOX, bits_for(peak))(**half_call)[0]
    assert torch.isfinite(folded).all()
    error = (folded.float() - expected).abs().max()
    assert error <= (bf16 - expected).abs().max() / 4


def test_the_peak_is_measured_by_the_fp32_rerun_of_a_half_model():
    denoiser, call = build("5B", peak=5e5)
    expected = stream_peak(denoiser, COGVIDEOX, lambda: denoiser(**call))
    half, half_call = denoiser.half(), in_dtype(call, torch.float16)
    found = stream_peak(half, COGVIDEOX, lambda: run_in_fp32(half, **half_call))
    assert found == pytest.approx(expected, rel=0.01)
    assert not any(m._forward_pre_hooks for m in half.modules())


def test_k_from_the_peak():
    assert [bits_for(peak) for peak in (0, 1, 16376, 16377, 65504, 65505, 5e5)] == [0, 0, 0, 1, 2, 3, 5]
    with pytest.raises(ValueError, match="measure it in fp32"):
        bits_for(float("inf"))


def test_an_overflow_inside_a_feed_forward_is_not_helped():
    denoiser, call = build("5B")
    denoiser.transformer_blocks[0].ff.net[0].proj.weight.mul_(1e6)
    denoiser.transformer_blocks[0].ff.net[2].weight.div_(1e6)
    half = denoiser.half()
    assert not torch.isfinite(fold(half, COGVIDEOX, 6)(**in_dtype(call, torch.float16))[0]).all()


def test_what_cannot_be_folded_is_named():
    denoiser, _ = build("5B")
    denoiser.transformer_blocks[2].ff.net[2] = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(CannotFold, match=r"'transformer_blocks.2.ff.net.2' is a Bilinear.*needs a Linear"):
        fold(denoiser, COGVIDEOX, 4)
