"""Scaled products alone, and the real diffusers classes with every layer scaled, also with LoRA: float32's range, and
fp16's digits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from comfyui_onediff_guard.precision.scaled_products import limit_of, reaches, scaled_product, times
from guards import error
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from small_denoisers import ATTENTION, FEED_FORWARD, MODELS, build, in_dtype
from stream_peaks import stream_peak
from tiers import drawn
from torch import nn
from torch.nn import functional as F

# peft's, at each adapter after the first
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
HALF, BFLOAT = torch.float16, torch.bfloat16
LAYERS = {
    "linear": (lambda: nn.Linear(24, 16), (3, 5, 24)),
    "convolution": (lambda: nn.Conv1d(6, 8, 3, padding=1), (3, 6, 11)),
    "of pictures": (lambda: nn.Conv2d(6, 8, 3, stride=2, groups=2), (3, 6, 9, 7)),
    "of videos": (lambda: nn.Conv3d(4, 8, 3, padding=1, bias=False), (2, 4, 3, 5, 4)),
}


def scaled(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight

    def product(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) if weight.ndim == 2 else layer._conv_forward(x, weight, None)

    return scaled_product(product, x, weight.dtype, limit_of(reaches(weight).amax()), weight.ndim - 2, layer.bias)


def drawn_layer(name: str, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """(layer whose weights fp16 holds, in float32; its input)"""
    torch.manual_seed(seed)
    make, shape = LAYERS[name]
    layer = make().half().float().requires_grad_(False)
    return layer, torch.randn(shape)


# --- a product --------------------------------------------------------------------------------------------------------


@settings(max_examples=drawn(200, 40), deadline=None)
@given(name=st.sampled_from(sorted(LAYERS)), power=st.integers(-60, 60), weights=st.integers(-8, 12))
def test_a_scaled_product_has_float32s_range_and_fp16s_digits(name, power, weights):
    layer, x = drawn_layer(name, seed=power)
    layer.weight.mul_(2.0**weights)
    if layer.bias is not None:
        layer.bias.zero_()
    x *= 2.0**power
    found = scaled(layer.half(), x)
    expected = layer.float()(x)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert error(found, expected) < 2**-10


@pytest.mark.parametrize("name", LAYERS)
def test_half_and_float32_inputs_come_to_the_same_and_in_float32_it_is_the_layer(name):
    layer, x = drawn_layer(name)
    torch.testing.assert_close(scaled(layer, x), layer(x), rtol=1e-6, atol=1e-6)
    assert torch.equal(scaled(layer.half(), x.half()), scaled(layer, x.half().float()))


def test_no_sign_takes_the_product_out_of_range():
    """The worst case: every product in a sum at its largest, and all of one sign."""
    layer = nn.Linear(4096, 8, bias=False).half().requires_grad_(False)
    layer.weight.fill_(6e4)
    x = torch.full((2, 4096), 65504.0).half()
    expected = x.float() @ layer.weight.float().T
    found = scaled(layer, x)
    assert found.isfinite().all() and error(found, expected) < 2**-10
    assert layer(x).isinf().all()


def test_each_row_has_a_scale_of_its_own():
    layer, _ = drawn_layer("linear")
    torch.manual_seed(1)
    x = torch.randn(7, 24) * torch.tensor([1e-30, 1e-6, 0.0, 1.0, 1e6, 1e20, 1e30])[:, None]
    layer.bias.zero_()
    found = scaled(layer.half(), x)
    expected = layer.float()(x)
    assert torch.equal(found[2], torch.zeros(16))
    assert [i for i in (0, 1, 3, 4, 5, 6) if not error(found[i] / x[i].max(), expected[i] / x[i].max()) < 2**-9] == []
    assert scaled(layer, torch.full((1, 24), 1e-40)).isfinite().all()


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_what_is_broken_stays_so_for_the_guard_to_find(broken):
    layer, x = drawn_layer("linear")
    x[1, 2, 3] = broken
    finite = scaled(layer.half(), x).isfinite().all(-1)
    assert not finite[1, 2] and finite.sum() == finite.numel() - 1


def test_the_bias_keeps_its_digits_beside_a_huge_scale():
    layer, x = drawn_layer("linear")
    layer.weight.zero_()
    assert torch.equal(scaled(layer.half(), x * 1e30), layer.bias.float().expand(3, 5, 16))


@pytest.mark.parametrize("given", [torch.float32, BFLOAT])
@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**40])
def test_what_fits_once_it_is_scaled_is_not_cast_before(given, factor):
    right = torch.tensor([1.5, -3.0, 0.0]).half()
    made = times((right.double() / factor).to(given), torch.tensor(factor), HALF)
    assert made.dtype is HALF and torch.equal(made, right)


# --- denoisers with every layer scaled, and with LoRA as peft makes it ------------------------------------------------

LORAS: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {  # → each adapter's scale, and what more peft is told
    "no LoRA": ((), {}),
    "one": ((1.0,), {}),
    "several": ((0.7, -0.3), {}),
    "with bias": ((0.7,), {"lora_bias": True}),
    "DoRA": ((1.0,), {"use_dora": True}),
}
HOT: dict[str, dict[str, Any]] = {  # of `build`
    "healthy": {},
    "hot": {"peak": 5e5, "writer": FEED_FORWARD},
    "hot attention": {"peak": 5e5, "writer": ATTENTION},
}


def adapted(name: str, scales: tuple[float, ...], config: dict[str, Any], hot: dict[str, Any]) -> tuple[Any, Any]:
    """(denoiser with an adapter for each scale, one call's arguments)"""
    denoiser, call = build(name, **hot)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2"]
    config = {"r": 4, "lora_alpha": 6, "target_modules": targets, "init_lora_weights": False} | config
    names = [f"lora_{index}" for index in range(len(scales))]
    for adapter in names:
        inject_adapter_in_model(LoraConfig(**config), denoiser, adapter_name=adapter)
    for layer in denoiser.modules():
        if hasattr(layer, "set_scale"):
            layer.set_adapter(names)
            for adapter, scale in zip(names, scales, strict=True):
                layer.set_scale(adapter, scale)
    return denoiser.eval().requires_grad_(False), call


def check_two_steps(denoiser: Any, call: dict[str, Any]) -> torch.Tensor:
    """By rows, and by what that showed: both near to fp32. Returns what it puts out in fp32."""
    right = denoiser(**call)[0]
    bf16 = copy.deepcopy(denoiser).to(BFLOAT)(**in_dtype(call, BFLOAT))[0]
    products, half = LearnedProducts(), denoiser.half()
    for step in ("by rows", "by the plan"):
        found = products.run(half, **call)[0]
        assert found.isfinite().all() and error(found, right) <= error(bf16, right) / 4, step
    assert products._renewals == 0
    return right


@pytest.mark.parametrize("hot", HOT.values(), ids=HOT)
@pytest.mark.parametrize(("scales", "config"), LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("name", MODELS)
def test_a_denoiser_is_finite_and_four_times_nearer_to_fp32_than_bf16(name, scales, config, hot):
    right = check_two_steps(*adapted(name, scales, config, hot))
    denoiser, call = build(name, **hot)
    assert not scales or error(denoiser(**call)[0], right) > 1e-3, "the LoRA does something"
    plain = denoiser.half()(**in_dtype(call, HALF))[0]
    assert not hot or not error(plain, build(name, **hot)[0](**call)[0]) < 0.1, "and without protection it is lost"


@pytest.mark.parametrize("name", ["CogVideoX-5B", "CogView3-Plus", "CogView4"])
def test_a_stream_at_1e15_is_finite_and_four_times_nearer_than_bf16(name):
    """As far as fp16 weights can take it: large gates, large weights, and a feed-forward at the end of its range."""
    denoiser, call = build(name)
    block = denoiser.transformer_blocks[1]
    inner = block.ff.net[0].proj
    inner.weight.zero_()
    inner.bias.copy_(torch.linspace(3e4, 6e4, inner.out_features).half())
    layer, *gates = MODELS[name].gates[FEED_FORWARD]
    block.get_submodule(layer).bias.view(-1, 64)[gates] = 6.4e4
    block.ff.net[2].weight.mul_(3e5)
    assert block.ff.net[2].weight.abs().max() < 65504
    assert stream_peak(denoiser, MODELS[name].family.blocks, lambda: denoiser(**call)) > 1e15
    check_two_steps(denoiser, call)
