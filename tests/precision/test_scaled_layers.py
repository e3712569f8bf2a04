"""Scaled layers alone, fp32 residual streams in the real diffusers classes, and LoRA around both: float32's range, and
nearer to fp32 than fp16."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.observe import leaf_peaks
from comfyui_onediff_guard.precision.overrides import ModuleStructure, diagnose_from_fp32_peaks
from comfyui_onediff_guard.precision.scaled_layers import CannotProtect, with_fp32_residual_stream
from guards import error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from small_denoisers import ATTENTION, FEED_FORWARD, MODELS, Size, build, in_dtype
from stream_peaks import stream_peak
from tiers import drawn
from torch import nn

# peft's, at each adapter after the first
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
HALF, BFLOAT = torch.float16, torch.bfloat16
SIZES = st.builds(
    Size,
    heads=st.integers(1, 5),
    layers=st.integers(1, 4),
    tokens=st.integers(1, 20),
    height=st.sampled_from([2, 4, 8, 10]),
    width=st.sampled_from([2, 6, 12]),
)
LAYERS = {
    "linear": (lambda: nn.Linear(24, 16), (3, 5, 24)),
    "convolution": (lambda: nn.Conv1d(6, 8, 3, padding=1), (3, 6, 11)),
    "of pictures": (lambda: nn.Conv2d(6, 8, 3, stride=2, groups=2), (3, 6, 9, 7)),
    "of videos": (lambda: nn.Conv3d(4, 8, 3, padding=1, bias=False), (2, 4, 3, 5, 4)),
}


def scaled(layer: nn.Module) -> nn.Module:
    return with_fp32_residual_stream(layer, [""], HALF)


def drawn_layer(name: str, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """(layer whose weights fp16 holds, in float32; its input)"""
    torch.manual_seed(seed)
    make, shape = LAYERS[name]
    layer = make().half().float().requires_grad_(False)
    return layer, torch.randn(shape)


def protected(name: str, denoiser: Any, dtype: torch.dtype = HALF, device: torch.device | None = None) -> Any:
    stream: Any = MODELS[name].family.stream
    writers, readers = stream.writer_names(denoiser), stream.reader_names(denoiser)
    return with_fp32_residual_stream(denoiser, writers, dtype, readers=readers, device=device)


def three_ways(denoiser: Any, call: dict[str, Any], name: str) -> tuple[torch.Tensor, ...]:
    """What it puts out in fp32, plain fp16, bf16, and fp16 with an fp32 residual stream. It is in fp16 afterwards."""
    right = denoiser(**call)[0]
    bf16 = copy.deepcopy(denoiser).to(BFLOAT)(**in_dtype(call, BFLOAT))[0]
    half, half_call = denoiser.half(), in_dtype(call, HALF)
    return right, half(**half_call)[0], bf16, protected(name, half)(**half_call)[0]


# --- a layer ----------------------------------------------------------------------------------------------------------


@settings(max_examples=drawn(200, 40), deadline=None)
@given(name=st.sampled_from(sorted(LAYERS)), power=st.integers(-60, 60), weights=st.integers(-8, 12))
def test_a_scaled_layer_has_float32s_range_and_fp16s_digits(name, power, weights):
    layer, x = drawn_layer(name, seed=power)
    layer.weight.mul_(2.0**weights)
    if layer.bias is not None:
        layer.bias.zero_()
    x *= 2.0**power
    found = scaled(layer.half())(x)
    expected = layer.float()(x)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert error(found, expected) < 2**-10


@pytest.mark.parametrize("name", LAYERS)
def test_half_and_float32_inputs_come_to_the_same_and_the_layer_is_not_touched(name):
    layer, x = drawn_layer(name)
    torch.testing.assert_close(scaled(layer)(x), layer(x), rtol=1e-6, atol=1e-6)  # in float32 it is the layer
    before = dict(vars(layer)), layer(x), type(layer)
    shell = scaled(layer)
    shell(x)
    assert isinstance(shell, before[2]) and shell.weight is layer.weight
    assert vars(layer) == before[0] and torch.equal(layer(x), before[1]) and type(layer) is before[2]
    assert torch.equal(scaled(layer.half())(x.half()), scaled(layer)(x.half().float()))


def test_a_layer_with_its_own_method_as_an_attribute_is_scaled():
    """transformers 4 leaves it on layers of which it recorded outputs."""
    layer, x = drawn_layer("linear")
    expected = scaled(layer.half())(x)
    layer.forward = layer.forward
    made = scaled(layer)(x)
    assert made.dtype is torch.float32 and torch.equal(made, expected)


def test_no_sign_takes_the_product_out_of_range():
    """The worst case: every product in a sum at its largest, and all of one sign."""
    layer = nn.Linear(4096, 8, bias=False).half().requires_grad_(False)
    layer.weight.fill_(6e4)
    x = torch.full((2, 4096), 65504.0).half()
    expected = x.float() @ layer.weight.float().T
    found = scaled(layer)(x)
    assert found.isfinite().all() and error(found, expected) < 2**-10
    assert layer(x).isinf().all()


def test_each_row_has_a_scale_of_its_own():
    layer, _ = drawn_layer("linear")
    torch.manual_seed(1)
    x = torch.randn(7, 24) * torch.tensor([1e-30, 1e-6, 0.0, 1.0, 1e6, 1e20, 1e30])[:, None]
    layer.bias.zero_()
    found = scaled(layer.half())(x)
    expected = layer.float()(x)
    assert torch.equal(found[2], torch.zeros(16))
    assert [i for i in (0, 1, 3, 4, 5, 6) if not error(found[i] / x[i].max(), expected[i] / x[i].max()) < 2**-9] == []
    assert scaled(layer)(torch.full((1, 24), 1e-40)).isfinite().all()


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_what_is_broken_stays_so_for_the_guard_to_find(broken):
    layer, x = drawn_layer("linear")
    x[1, 2, 3] = broken
    finite = scaled(layer.half())(x).isfinite().all(-1)
    assert not finite[1, 2] and finite.sum() == finite.numel() - 1


def test_the_bias_keeps_its_digits_beside_a_huge_scale():
    layer, x = drawn_layer("linear")
    layer.weight.zero_()
    assert torch.equal(scaled(layer.half())(x * 1e30), layer.bias.float().expand(3, 5, 16))


# --- a stream ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_stream_comes_out_nearer_to_fp32_than_plain_fp16(name):
    denoiser, call = build(name)
    half = copy.deepcopy(denoiser).half()
    state = {name: (id(tensor), tensor.clone()) for name, tensor in half.state_dict(keep_vars=True).items()}
    before = {name: (id(part), type(part)) for name, part in half.named_modules()}
    protected(name, half)(**in_dtype(call, HALF))
    right, plain, bf16, found = three_ways(denoiser, call, name)
    assert found.dtype == HALF
    assert error(found, right) < error(plain, right) and error(found, right) < error(bf16, right) / 4
    assert torch.equal(half(**in_dtype(call, HALF))[0], plain), "the original is not touched"
    assert {name: (id(part), type(part)) for name, part in half.named_modules()} == before
    for key, tensor in half.state_dict(keep_vars=True).items():
        assert id(tensor) == state[key][0] and torch.equal(tensor, state[key][1])


@pytest.mark.parametrize("writer", [ATTENTION, FEED_FORWARD])
@pytest.mark.parametrize("name", MODELS)
def test_a_stream_at_5e5_is_lost_in_plain_fp16_and_four_times_nearer_than_bf16(name, writer):
    right, plain, bf16, found = three_ways(*build(name, peak=5e5, writer=writer), name)
    assert found.isfinite().all() and error(found, right) <= error(bf16, right) / 4
    if (name, writer) != ("CogView3-Plus", FEED_FORWARD):
        assert torch.isnan(plain).all()
    else:  # the clip at its blocks' ends is in time for the feed-forward, and too late for attention: a norm is before
        assert plain.isfinite().all() and (plain.float() - right).abs().max() > 0.25 * right.abs().max(), "and wrong"


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
    stream: Any = MODELS[name].family.stream
    assert stream_peak(denoiser, stream, lambda: denoiser(**call)) > 1e15
    right, _, bf16, found = three_ways(denoiser, call, name)
    assert found.isfinite().all() and error(found, right) <= error(bf16, right) / 4


@settings(max_examples=drawn(40, 10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(MODELS)), size=SIZES)
def test_in_fp32_it_is_the_denoiser_at_any_size(name, size):
    denoiser, call = build(name, size=size)
    expected = denoiser(**call)[0]
    made = protected(name, denoiser, torch.float32)(**call)[0]
    assert error(made, expected) < 1e-5


@pytest.mark.parametrize("name", ["CogVideoX-5B", "CogView3-Plus", "CogView4"])
def test_the_stream_alone_is_float32(name):
    denoiser, call = build(name)
    stream: Any = MODELS[name].family.stream
    shell: Any = protected(name, denoiser.half())
    given: dict[str, torch.dtype] = {}
    block = shell.transformer_blocks[1]
    norms = {f"transformer_blocks.1.{norm}" for norm in stream.norms}
    for layer in stream.norm_names(shell):
        shell.get_submodule(layer).register_forward_pre_hook(
            lambda _norm, args, layer=layer: given.__setitem__(layer, args[0].dtype)
        )
    for layer in ("attn1.to_q", "ff.net.0.proj"):
        block.get_submodule(layer).register_forward_hook(
            lambda _layer, _args, made, layer=layer: given.__setitem__(layer, made.dtype)
        )
    shell(**in_dtype(call, HALF))
    assert {given[layer] for layer in norms | {*stream.last_norms}} == {torch.float32}
    assert {given["attn1.to_q"], given["ff.net.0.proj"]} == {HALF}


def test_an_overflow_inside_a_feed_forward_is_not_helped():
    denoiser, call = build("CogVideoX-5B")
    denoiser.transformer_blocks[0].ff.net[0].proj.weight.mul_(1e6)
    denoiser.transformer_blocks[0].ff.net[2].weight.mul_(1e-6)
    found = protected("CogVideoX-5B", denoiser.half())(**in_dtype(call, HALF))[0]
    assert not found.isfinite().all()


def test_what_cannot_be_scaled_is_named():
    denoiser, _ = build("CogVideoX-5B")
    denoiser.set_submodule("transformer_blocks.2.ff.net.2", nn.Bilinear(2, 2, 2))
    with pytest.raises(CannotProtect, match=r"'transformer_blocks.2.ff.net.2' is a Bilinear.*Use precision 'bf16'"):
        protected("CogVideoX-5B", denoiser)


# --- around LoRA, as peft makes it ------------------------------------------------------------------------------------

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2"]


def adapted(name, scales=(1.0,), peak=None, writer=FEED_FORWARD, **config):
    """(denoiser with an adapter for each scale, one call's arguments)"""
    denoiser, call = build(name, peak=peak, writer=writer)
    config = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "init_lora_weights": False} | config
    names = [f"lora_{index}" for index in range(len(scales))]
    for adapter in names:
        inject_adapter_in_model(LoraConfig(**config), denoiser, adapter_name=adapter)
    for layer in denoiser.modules():
        if hasattr(layer, "set_scale"):
            layer.set_adapter(names)
            for adapter, scale in zip(names, scales, strict=True):
                layer.set_scale(adapter, scale)
    return denoiser.eval().requires_grad_(False), call


@pytest.mark.parametrize("lora_bias", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_in_fp32_it_is_the_adapted_denoiser(name, lora_bias):
    denoiser, call = adapted(name, (0.7, -0.3), lora_bias=lora_bias)
    state = {name: tensor.clone() for name, tensor in denoiser.state_dict().items()}
    expected = denoiser(**call)[0]
    assert not torch.equal(expected, build(name)[0](**call)[0]), "the LoRA does something"
    assert error(protected(name, denoiser, torch.float32)(**call)[0], expected) < 1e-5
    assert torch.equal(denoiser(**call)[0], expected), "the original is not touched"
    assert all(torch.equal(state[name], tensor) for name, tensor in denoiser.state_dict().items())


@settings(max_examples=drawn(15, 5), suppress_health_check=[HealthCheck.too_slow])
@given(
    rank=st.integers(1, 9),
    scales=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=3),
    targets=st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
)
def test_in_fp32_it_is_the_adapted_denoiser_at_any_rank_scale_and_target(rank, scales, targets):
    denoiser, call = adapted("CogVideoX-5B", scales, r=rank, target_modules=targets)
    made = protected("CogVideoX-5B", denoiser, torch.float32)(**call)[0]
    assert error(made, denoiser(**call)[0]) < 1e-5


def test_what_an_adapter_adds_counts_in_what_a_row_may_reach():
    """Alone, the base layer would let rows through whose product with the adapter is infinite."""
    denoiser, call = adapted("CogVideoX-5B", (1.0,), lora_alpha=4)
    for block in denoiser.transformer_blocks:
        block.ff.net[2].lora_B["lora_0"].weight.mul_(1e4)
    expected = denoiser(**call)[0]
    found = protected("CogVideoX-5B", denoiser.half())(**in_dtype(call, HALF))[0]
    assert found.isfinite().all() and error(found, expected) < 0.01


@pytest.mark.parametrize(("name", "writer"), [("CogVideoX-5B", ATTENTION), ("CogView4", FEED_FORWARD)])
def test_an_adapted_stream_beyond_fp16_is_finite_and_four_times_nearer_than_bf16(name, writer):
    denoiser, call = adapted(name, peak=5e5, writer=writer)
    assert stream_peak(denoiser, MODELS[name].family.stream, lambda: denoiser(**call)) > 1e5
    right, plain, bf16, found = three_ways(denoiser, call, name)
    assert plain.isnan().all() and found.isfinite().all() and error(found, right) <= error(bf16, right) / 4


def test_the_stream_is_blamed_for_what_an_adapted_writer_puts_out():
    denoiser, call = adapted("CogVideoX-5B")
    denoiser.transformer_blocks[1].ff.net[2].base_layer.weight.mul_(1e7)
    peaks = leaf_peaks(denoiser, lambda: denoiser(**call))
    assert peaks["transformer_blocks.1.ff.net.2.base_layer"].output > 65504
    structure = ModuleStructure.of(denoiser, ["transformer_blocks"], MODELS["CogVideoX-5B"].family.stream)
    finding = diagnose_from_fp32_peaks(
        {name: peak for name, peak in peaks.items() if not name.endswith("net.3")}, structure, "fp16"
    )
    assert finding is not None and finding.reason.startswith("the residual stream reaches")
    assert finding.stream is not None and not finding.fallback_blocks


def test_what_a_scaled_layer_needs_is_brought_where_it_computes():
    denoiser, _ = adapted("CogVideoX-5B", (0.7, -0.3), lora_bias=True)
    made = protected("CogVideoX-5B", denoiser, torch.float32, torch.device("meta"))
    scaled = [layer for layer in made.modules() if hasattr(layer, "product_limit")]
    assert scaled and all(layer.product_limit.is_meta for layer in scaled)
    adapted_biases = [layer.product_bias for layer in scaled if hasattr(layer, "lora_B")]
    assert adapted_biases and all(bias.is_meta for bias in adapted_biases)


def test_dora_is_no_mere_sum_and_cannot_be_scaled():
    denoiser, _ = adapted("CogVideoX-5B", use_dora=True)
    with pytest.raises(CannotProtect, match=r"attn1.to_out.0' is a Linear with DoRA"):
        protected("CogVideoX-5B", denoiser)
