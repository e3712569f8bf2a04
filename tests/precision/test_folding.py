"""The fold, on the real diffusers classes: bit-equal in fp32, finite and near fp32 in fp16."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.precision.folding import CannotFold, bits_for, fold
from comfyui_onediff_guard.precision.observe import stream_peak
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_denoisers import ATTENTION, FEED_FORWARD, MODELS, Size, build, in_dtype
from tiers import drawn

SIZES = st.builds(
    Size,
    heads=st.integers(1, 5),
    layers=st.integers(1, 4),
    tokens=st.integers(1, 20),
    height=st.sampled_from([2, 4, 8, 10]),
    width=st.sampled_from([2, 6, 12]),
)


def in_half(name, writer):
    """(denoiser in fp16 whose stream reaches 5e5 in fp32, one call's arguments)."""
    denoiser, call = build(name, peak=5e5, writer=writer)
    return denoiser.half(), in_dtype(call, torch.float16)


@pytest.mark.parametrize("k", [1, 6, 12])
@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_bit_equal_with_and_without_the_fold(name, k):
    denoiser, call = build(name)
    state = {name: tensor.clone() for name, tensor in denoiser.state_dict().items()}
    expected = denoiser(**call)[0]
    assert torch.equal(fold(denoiser, MODELS[name].family.stream, k)(**call)[0], expected)
    assert torch.equal(denoiser(**call)[0], expected), "the original is not touched"
    assert all(torch.equal(state[name], tensor) for name, tensor in denoiser.state_dict().items())


@settings(max_examples=drawn(40, 10), suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(MODELS)), size=SIZES, k=st.integers(0, 12))
def test_fp32_is_bit_equal_at_any_size_and_k(name, size, k):
    denoiser, call = build(name, size=size)
    assert torch.equal(fold(denoiser, MODELS[name].family.stream, k)(**call)[0], denoiser(**call)[0])


@pytest.mark.parametrize("writer", [ATTENTION, FEED_FORWARD])
@pytest.mark.parametrize("name", MODELS)
def test_a_stream_at_5e5_is_finite_and_four_times_nearer_than_bf16_when_folded(name, writer):
    stream = MODELS[name].family.stream
    denoiser, call = build(name, peak=5e5, writer=writer)
    peak = stream_peak(denoiser, stream, lambda: denoiser(**call))
    assert 4e5 < peak < 6e5
    expected = denoiser(**call)[0]
    bf16 = denoiser.to(torch.bfloat16)(**in_dtype(call, torch.bfloat16))[0].float()

    half, half_call = in_half(name, writer)
    folded = fold(half, stream, bits_for(peak))(**half_call)[0]
    assert folded.dtype == torch.float16 and torch.isfinite(folded).all()
    error = (folded.float() - expected).abs().max()
    assert error <= (bf16 - expected).abs().max() / 4


@pytest.mark.parametrize("writer", [ATTENTION, FEED_FORWARD])
@pytest.mark.parametrize("name", MODELS)
def test_a_stream_at_5e5_is_lost_in_plain_fp16(name, writer):
    half, call = in_half(name, writer)
    plain = half(**call)[0]
    if (name, writer) != ("CogView3-Plus", FEED_FORWARD):
        assert torch.isnan(plain).all()
        return
    # The clip at its blocks' ends is in time for the feed-forward, and too late for attention: a norm comes before it.
    assert torch.isfinite(plain).all()
    denoiser, call = build(name, peak=5e5, writer=writer)
    expected = denoiser(**call)[0]
    assert (plain.float() - expected).abs().max() > 0.25 * expected.abs().max(), "finite, and wrong"


@pytest.mark.parametrize("name", ["CogVideoX-5B", "CogView3-Plus", "CogView4"])
def test_the_peak_is_measured_by_the_fp32_rerun_of_a_half_model(name):
    denoiser, call = build(name, peak=5e5)
    stream = MODELS[name].family.stream
    expected = stream_peak(denoiser, stream, lambda: denoiser(**call))
    half, half_call = denoiser.half(), in_dtype(call, torch.float16)
    found = stream_peak(half, stream, lambda: run_in_fp32(half, **half_call))
    assert found == pytest.approx(expected, rel=0.01)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in half.modules())


def test_k_from_the_peak():
    assert [bits_for(peak) for peak in (0, 1, 16376, 16377, 65504, 65505, 5e5)] == [0, 0, 0, 1, 2, 3, 5]
    with pytest.raises(ValueError, match="measure it in fp32"):
        bits_for(float("inf"))


@given(peak=st.floats(1e-30, 1e30))
def test_k_leaves_two_bits_of_headroom_and_no_more(peak):
    k = bits_for(peak)
    assert peak * 2.0**-k <= 65504 / 4
    assert k == 0 or peak * 2.0 ** -(k - 1) > 65504 / 4


@pytest.mark.parametrize("inner", [("ff.net.0.proj", FEED_FORWARD), ("attn1.to_v", ATTENTION)])
def test_an_overflow_inside_a_feed_forward_or_attention_is_not_helped(inner):
    denoiser, call = build("CogVideoX-5B")
    for layer, factor in zip(inner, (1e6, 1e-6), strict=True):
        denoiser.transformer_blocks[0].get_submodule(layer).weight.mul_(factor)
    folded = fold(denoiser.half(), MODELS["CogVideoX-5B"].family.stream, 6)
    assert not torch.isfinite(folded(**in_dtype(call, torch.float16))[0]).all()


@pytest.mark.parametrize(
    ("name", "layer", "needed"),
    [
        ("CogVideoX-5B", "transformer_blocks.2.ff.net.2", "Linear"),
        ("CogVideoX-5B", "transformer_blocks.1.norm1.norm", "LayerNorm"),
        ("CogView4", "norm_out.norm", "LayerNorm"),
    ],
)
def test_what_cannot_be_folded_is_named(name, layer, needed):
    denoiser, _ = build(name)
    denoiser.set_submodule(layer, torch.nn.Bilinear(2, 2, 2))
    with pytest.raises(CannotFold, match=rf"'{layer}' is a Bilinear.*needs a {needed}"):
        fold(denoiser, MODELS[name].family.stream, 4)
