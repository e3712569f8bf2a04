"""Attention with all layers scaled: values that fp16 cannot resolve use float32, or give NaN on a device."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import scaled_products
from comfyui_onediff_guard.precision.after_failure import (
    FallbackAdapter,
    HalfPrecisionForward,
    build_half_precision_forward,
)
from comfyui_onediff_guard.precision.overrides import STAY, PrecisionOverrides
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from comfyui_onediff_guard.precision.upcast import run_in, run_in_fp32
from diffusers.models.attention_processor import Attention
from guards import guarded
from tiers import by_tier
from torch import nn
from torch.nn import functional as F

FP16, BF16 = torch.float16, torch.bfloat16
LEAST = torch.finfo(torch.float32).min


Call = tuple[dict[str, torch.Tensor], dict[str, Any]]  # query, key, value; other arguments


def random_call(seed: int) -> Call:
    """A random call. Not by hypothesis: its draws depend on other imports, and it searches for the one call in ten
    thousand in which bf16 is right by chance."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    queries, keys, channels = draw.randint(1, 9), draw.randint(1, 9), draw.choice([8, 16, 40])
    for_each, heads = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2)])  # query heads per key head, key heads
    masked = draw.choice(["none", "none", "causal", *masks_of(torch.zeros(1), torch.zeros(1))])
    named: dict[str, Any] = {"scale": draw.choice([None, None, 1.0, 0.3, 3.0, 0.01]), "enable_gqa": for_each > 1}
    tensors = {"query": torch.randn(2, for_each * heads, queries, channels, generator=generator)}
    tensors |= {name: torch.randn(2, heads, keys, channels, generator=generator) for name in ("key", "value")}
    for _ in range(draw.randint(0, 4)):
        enlarge_part(tensors, draw, generator)
    bias = torch.randn(2, 1, queries, keys, generator=generator)
    masks = masks_of(bias, torch.rand(2, 1, queries, keys, generator=generator) > 0.4)
    return tensors, named | ({"attn_mask": masks[masked]} if masked in masks else {"is_causal": masked == "causal"})


def masks_of(bias: torch.Tensor, shown: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "shown": shown,
        "bias": bias,
        "bias of 1e3": bias * 1e3,
        "bias at 1e3": bias + 1e3,
        "bias for all": bias[:1, :, :1] if bias.ndim > 1 else bias,
        "-inf": bias.where(shown > 0, -torch.inf),
        "least": bias.where(shown > 0, LEAST),
        "-1e9": torch.where(shown > 0, 0.0, -1e9),
    }


def enlarge_part(tensors: dict[str, torch.Tensor], draw: random.Random, generator: torch.Generator) -> None:
    """Multiply a token, channel or head of queries, keys or values, or all of them, by a large factor."""
    of, part = draw.choice(["query", "key", "value"]), draw.choice(["token"] * 2 + ["channel"] * 2 + ["head", "all"])
    factor, makes_up = 10.0 ** draw.uniform(0, draw.choice([4, 30])), draw.random() < 0.5
    head, token, channel = (int(torch.randint(most, (), generator=generator)) for most in tensors[of].shape[1:])
    parts = {"token": (..., token, slice(None)), "channel": (..., channel), "head": (slice(None), head), "all": ...}
    factor = min(factor, 100.0) if part == "all" else factor
    if tensors[of].abs().max() * factor > 1e36:  # near float32's maximum
        return
    tensors[of][parts[part]] *= factor
    other = {"query": "key", "key": "query"}.get(of)
    if other and makes_up and part == "channel":
        tensors[other][..., channel] /= factor


def attention(tensors: dict[str, torch.Tensor], named: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    mask = named.get("attn_mask")
    cast = {} if mask is None or mask.dtype is torch.bool else {"attn_mask": mask.to(dtype)}
    return F.scaled_dot_product_attention(**{name: x.to(dtype) for name, x in tensors.items()}, **named | cast)


def scaled(tensors: dict[str, torch.Tensor], named: dict[str, Any], dtype: torch.dtype = FP16) -> torch.Tensor:
    return run_in(ScaledHalfMatmulMode(dtype), F.scaled_dot_product_attention, (), tensors | named)


def reference_attention(tensors: dict[str, torch.Tensor], named: dict[str, Any]) -> torch.Tensor:
    """Attention in float32; in float64 where a logit could overflow float32, which would look like a masked key."""
    query, key = tensors["query"].double().abs(), tensors["key"].double().abs()
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    return attention(tensors, named, torch.float32 if logits.max() < 1e37 else torch.float64)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error by norm; infinite for NaN."""
    exact = exact.double()
    off = ((found.double() - exact).norm() / exact.norm().clamp(min=1e-300)).item()
    return math.inf if math.isnan(off) else off


def test_scaled_attention_with_outliers_is_no_worse_than_bf16() -> None:
    for seed in range(by_tier(2000, 500)):
        call = random_call(seed)
        exact = reference_attention(*call)
        assert error(scaled(*call), exact) <= error(attention(*call, BF16), exact), seed


def test_device_attention_is_near_fp32_or_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the host checks nothing; the guard detects NaN. Single calls may be slightly worse than bf16."""
    monkeypatch.setattr(scaled_products, "_is_on_host", lambda _: False)
    for seed in range(by_tier(1000, 200)):
        call = random_call(seed)
        mask = call[1].get("attn_mask")
        if mask is not None and mask.is_floating_point() and (mask == -1e9).any():
            continue  # float32 keeps only a few digits of a row that is fully masked this way
        exact, made = reference_attention(*call), scaled(*call)
        in_bf16 = max(error(attention(*call, BF16), exact), 1e-3)
        assert not made.isfinite().all() or error(made, exact) <= 2 * in_bf16, seed


@pytest.mark.parametrize("scale", [None, 0.3, 1.0, 3.0, 1e-6, 2.0**-3])
def test_softmax_scale_loses_no_digits(scale: float | None) -> None:
    """A scale that is not a power of two is not multiplied into rounded values."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(2, 4, 64, 40, generator=generator) for name in ("query", "key", "value")}
    tensors = {name: x.half().float() for name, x in tensors.items()}  # exact in fp16: only the call loses digits
    named = {"scale": scale}
    exact = attention(tensors, named, torch.float64)
    assert error(scaled(tensors, named), exact) <= 1.05 * error(attention(tensors, named, FP16), exact)


@pytest.mark.parametrize("channels", [slice(0, 8), slice(0, 1)])
@pytest.mark.parametrize("gain", [2.0**12, 2.0**-30, 1e9])
def test_query_gain_compensated_by_keys_keeps_the_result(gain: float, channels: slice) -> None:
    torch.manual_seed(0)
    layer: Any = Attention(32, heads=2, dim_head=16).requires_grad_(False)
    layer.to_q.weight[channels] *= gain
    layer.to_k.weight[channels] /= gain
    x = torch.randn(2, 6, 32)
    assert error(run_in(ScaledHalfMatmulMode(FP16), layer, (x,), {}), run_in_fp32(layer, x)) < 1e-3


@pytest.mark.parametrize("hidden", [LEAST, -torch.inf, -1e9, -1e30, torch.finfo(BF16).min])
@pytest.mark.parametrize("products", [FP16, BF16])
def test_row_with_all_keys_masked_matches_fp32(hidden: float, products: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(1, 2, 4, 16) for name in ("query", "key", "value")}
    mask = torch.randn(4, 4)
    mask[1], mask[2, 1:] = hidden, hidden
    for attn_mask in (mask, mask[1:2], mask > -1e8):
        exact = F.scaled_dot_product_attention(**tensors, attn_mask=attn_mask)
        made = scaled(tensors, {"attn_mask": attn_mask}, products)
        assert (made - exact).abs().max() < (2e-3 if products is FP16 else 2e-2)


@pytest.mark.parametrize("products", [FP16, BF16])
@pytest.mark.parametrize("bias", ["none", "additive"])
@pytest.mark.parametrize("sizes", [(0, 5, 16), (4, 0, 16), (4, 5, 0), (0, 0, 0)])
def test_attention_of_empty_tensors_matches_fp32(sizes: tuple[int, int, int], bias: str, products: torch.dtype) -> None:
    queries, keys, channels = sizes
    tensors = {"query": torch.randn(1, 2, queries, channels), "key": torch.randn(1, 2, keys, channels)}
    tensors["value"] = torch.randn(1, 2, keys, 7)
    named: dict[str, Any] = {"scale": 0.5} | ({"attn_mask": torch.randn(queries, keys)} if bias == "additive" else {})
    made = scaled(tensors, named, products)
    expected = F.scaled_dot_product_attention(**tensors, **named)
    assert made.dtype is torch.float32 and torch.allclose(made, expected, atol=2e-2, equal_nan=True)


def test_guard_recomputes_unresolved_attention_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_products, "_is_on_host", lambda _: False)
    torch.manual_seed(0)
    module = nn.Sequential(Attention(32, heads=2, dim_head=16), nn.Linear(32, 32)).half().requires_grad_(False)
    x = torch.randn(1, 6, 32)
    x[:, 2] *= 1e6  # one token is a million times larger than the others

    def build(learned: PrecisionOverrides) -> HalfPrecisionForward:
        return build_half_precision_forward(module, learned, "fp16", all_layers_scaled=True)

    guard = guarded(FallbackAdapter(module, "fp16", build))
    assert torch.equal(guard(x), run_in_fp32(module, x))
    [step] = guard.report.steps
    assert step.outcome == "rerun" and step.rerun and step.rerun.action == STAY
