"""The real diffusers classes with all layers scaled, with and without LoRA: float32's range and fp16's digits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from guards import error
from peft import LoraConfig, inject_adapter_in_model
from small_denoisers import ATTENTION, FEED_FORWARD, MODELS, build, in_dtype
from stream_peaks import stream_peak

# peft warns at each adapter after the first
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
HALF, BFLOAT = torch.float16, torch.bfloat16
LORAS: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {  # → scale of each adapter, more options for peft
    "no LoRA": ((), {}),
    "one": ((1.0,), {}),
    "several": ((0.7, -0.3), {}),
    "with bias": ((0.7,), {"lora_bias": True}),
    "DoRA": ((1.0,), {"use_dora": True}),
}
HOT: dict[str, dict[str, Any]] = {  # arguments of `build`
    "healthy": {},
    "hot": {"peak": 5e5, "writer": FEED_FORWARD},
    "hot attention": {"peak": 5e5, "writer": ATTENTION},
}


def adapted(name: str, scales: tuple[float, ...], config: dict[str, Any], hot: dict[str, Any]) -> tuple[Any, Any]:
    """(denoiser with an adapter for each scale, arguments of one call)"""
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
    """A step by rows and one by the plan: both near fp32. Returns the output in fp32."""
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
def test_denoiser_is_finite_and_four_times_nearer_to_fp32_than_bf16(name, scales, config, hot):
    right = check_two_steps(*adapted(name, scales, config, hot))
    denoiser, call = build(name, **hot)
    assert not scales or error(denoiser(**call)[0], right) > 1e-3, "the LoRA changes the output"
    plain = denoiser.half()(**in_dtype(call, HALF))[0]
    assert not hot or not error(plain, build(name, **hot)[0](**call)[0]) < 0.1, "plain fp16 fails"


@pytest.mark.parametrize("name", ["CogVideoX-5B", "CogView3-Plus", "CogView4"])
def test_stream_of_1e15_is_finite_and_four_times_nearer_than_bf16(name):
    """The largest stream that fp16 weights can make: large gates, large weights, feed-forward near fp16's maximum."""
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
