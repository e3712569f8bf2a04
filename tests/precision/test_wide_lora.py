"""Wide layers around LoRA, as peft makes it, on what writes to the stream."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.precision.observe import leaf_peaks
from comfyui_onediff_guard.precision.overrides import ModuleStructure, diagnose_from_fp32_peaks
from comfyui_onediff_guard.precision.wide import CannotWiden, with_wide_stream
from host_reads import HostReads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from small_denoisers import ATTENTION, FEED_FORWARD, MODELS, build, in_dtype
from stream_peaks import stream_peak
from tiers import drawn

# peft's, at each adapter after the first
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
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


def wide_stream(name, denoiser, dtype=torch.float16, device=None):
    stream = MODELS[name].family.stream
    assert stream
    readers = stream.reader_names(denoiser)
    return with_wide_stream(denoiser, stream.writer_names(denoiser), dtype, readers=readers, device=device)


def error(found, expected):
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("lora_bias", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_in_fp32_it_is_the_adapted_denoiser(name, lora_bias):
    denoiser, call = adapted(name, (0.7, -0.3), lora_bias=lora_bias)
    state = {name: tensor.clone() for name, tensor in denoiser.state_dict().items()}
    expected = denoiser(**call)[0]
    assert not torch.equal(expected, build(name)[0](**call)[0]), "the LoRA does something"
    assert error(wide_stream(name, denoiser, torch.float32)(**call)[0], expected) < 1e-5
    assert torch.equal(denoiser(**call)[0], expected), "the original is not touched"
    assert all(torch.equal(state[name], tensor) for name, tensor in denoiser.state_dict().items())


@settings(max_examples=drawn(15, 5), suppress_health_check=[HealthCheck.too_slow])
@given(
    rank=st.integers(1, 9),
    scales=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=3),
    targets=st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
)
def test_in_fp32_it_is_the_denoiser_at_any_rank_scale_and_target(rank, scales, targets):
    denoiser, call = adapted("CogVideoX-5B", scales, r=rank, target_modules=targets)
    made = wide_stream("CogVideoX-5B", denoiser, torch.float32)(**call)[0]
    assert error(made, denoiser(**call)[0]) < 1e-5


def test_what_an_adapter_adds_counts_in_what_a_row_may_reach():
    """Alone, the base layer would let rows through whose product with the adapter is infinite."""
    denoiser, call = adapted("CogVideoX-5B", (1.0,), lora_alpha=4)
    for block in denoiser.transformer_blocks:
        block.ff.net[2].lora_B["lora_0"].weight.mul_(1e4)
    expected = denoiser(**call)[0]
    found = wide_stream("CogVideoX-5B", denoiser.half())(**in_dtype(call, torch.float16))[0]
    assert found.isfinite().all() and error(found, expected) < 0.01


@pytest.mark.parametrize(("name", "writer"), [("CogVideoX-5B", ATTENTION), ("CogView4", FEED_FORWARD)])
def test_a_stream_beyond_fp16_is_finite_and_four_times_nearer_than_bf16(name, writer):
    stream = MODELS[name].family.stream
    denoiser, call = adapted(name, peak=5e5, writer=writer)
    peak = stream_peak(denoiser, stream, lambda: denoiser(**call))
    assert peak > 1e5
    expected = denoiser(**call)[0]
    bf16 = adapted(name, peak=5e5, writer=writer)[0].to(torch.bfloat16)(**in_dtype(call, torch.bfloat16))[0].float()

    half, half_call = denoiser.half(), in_dtype(call, torch.float16)
    assert torch.isnan(half(**half_call)[0]).all()
    found = wide_stream(name, half)(**half_call)[0]
    assert torch.isfinite(found).all()
    assert error(found, expected) <= error(bf16, expected) / 4


def test_the_stream_is_blamed_for_what_an_adapted_writer_puts_out():
    denoiser, call = adapted("CogVideoX-5B")
    denoiser.transformer_blocks[1].ff.net[2].base_layer.weight.mul_(1e7)
    peaks = leaf_peaks(denoiser, lambda: denoiser(**call))
    assert peaks["transformer_blocks.1.ff.net.2.base_layer"].output > 65504
    anatomy = ModuleStructure.of(denoiser, ["transformer_blocks"], MODELS["CogVideoX-5B"].family.stream)
    finding = diagnose_from_fp32_peaks(
        {name: peak for name, peak in peaks.items() if not name.endswith("net.3")}, anatomy, "fp16"
    )
    assert finding is not None and finding.reason.startswith("the residual stream reaches")
    assert finding.stream is not None and not finding.islands


@pytest.mark.parametrize("lora_bias", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_wide_layers_need_is_brought_in_one_copy(name, lora_bias):
    """lora_bias: None: there is no LoRA."""
    denoiser = build(name)[0] if lora_bias is None else adapted(name, (0.7, -0.3), lora_bias=lora_bias)[0]
    with HostReads() as moved:
        made = wide_stream(name, denoiser, torch.float32, torch.device("meta"))
    limits = [layer.wide_limit for layer in made.modules() if hasattr(layer, "wide_limit")]
    assert moved.copies == 1 < len(limits) and all(limit.is_meta for limit in limits)


@pytest.mark.parametrize("lora_bias", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_is_brought_what_is_its_own(name, lora_bias):
    denoiser, call = adapted(name, (0.7, -0.3), lora_bias=lora_bias)
    stays, brought = (wide_stream(name, denoiser, torch.float32, device) for device in (None, torch.device("cpu")))
    assert torch.equal(brought(**call)[0], stays(**call)[0])


def test_dora_is_no_mere_sum_and_cannot_be_wide():
    denoiser, _ = adapted("CogVideoX-5B", use_dora=True)
    with pytest.raises(CannotWiden, match=r"attn1.to_out.0' is a Linear with DoRA"):
        wide_stream("CogVideoX-5B", denoiser)
