"""All layers scaled: products in half precision and everything else in float32, for any network."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import scaled_products
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode, scaled_to
from comfyui_onediff_guard.precision.upcast import OneOperation, run_in, run_in_fp32
from guards import error
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import by_tier
from torch import nn
from torch.nn import functional as F

FP16, BF16 = torch.float16, torch.bfloat16
LAYERS = ("embed", "queries", "keys", "values", "out", "up", "down", "last")


class Network(nn.Module):
    """Linear layers, convolution and transposed convolution, attention, norms, and explicit casts."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Conv2d(4, width, 2, 2)
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last = nn.ConvTranspose2d(width, 4, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        for _ in range(2):
            normed = self.norm(x).to(self.out.weight.dtype)
            q, k, v = (
                layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for layer in (self.queries, self.keys, self.values)
            )
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.last(x.transpose(1, 2).unflatten(-1, (height, width)))


def network(dtype: torch.dtype = FP16, hot: str = "", gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    made = Network().eval().requires_grad_(False)
    if hot:
        made.state_dict()[f"{hot}.weight"].mul_(gain)
    return made.to(dtype)


def latents() -> torch.Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def scaled(module: Any, *given: Any, dtype: torch.dtype = FP16, **named: Any) -> Any:
    return run_in(ScaledHalfMatmulMode(dtype), module, given, named)


@pytest.mark.parametrize("stored", [FP16, BF16, torch.float32])
@pytest.mark.parametrize("hot", ["", *(name for name in LAYERS if name not in ("queries", "keys"))])
def test_scaled_network_is_near_fp32_and_never_overflows(hot: str, stored: torch.dtype) -> None:
    gain = 1e5 if stored is FP16 else 1e9
    module, x = network(stored, hot, gain), latents()
    exact, made, plain = (
        run_in_fp32(module, x),
        scaled(module, x),
        network(stored, hot, gain).to(FP16)(x.half()).float(),
    )
    assert made.dtype is torch.float32 and error(made, exact) < 2e-3
    if hot:
        assert stored is FP16 or not plain.isfinite().all()
    else:
        assert error(made, exact) <= error(plain, exact)
        assert error(made, exact) <= error(scaled(module, x, dtype=BF16), exact) / 4


@given(gain=st.integers(-60, 100), rows=st.integers(1, 5), spread=st.integers(0, 60), weights=st.integers(-8, 12))
@settings(max_examples=by_tier(400, 60), deadline=None)
def test_linear_layer_handles_rows_of_any_magnitude(gain: int, rows: int, spread: int, weights: int) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(48, 16).half().requires_grad_(False)
    layer.weight.mul_(2.0**weights)
    layer.bias.zero_()
    x = torch.randn(rows, 48) * 2.0 ** torch.linspace(gain - spread, gain, rows).unsqueeze(1)
    x = torch.cat([x, torch.zeros(1, 48)])
    exact = F.linear(x.double(), layer.weight.double())
    found = scaled(layer, x).double()
    assert ((found - exact).norm(dim=1) <= 2e-3 * exact.norm(dim=1)).all(), "each row separately"


def test_extreme_sums_stay_in_range_and_bias_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(4096, 8).half().requires_grad_(False)
    layer.bias.zero_()
    assert scaled(layer, torch.full((1, 4096), 1e-40)).isfinite().all()
    monkeypatch.setattr(scaled_products, "_is_on_host", lambda _: False)  # the host would recompute in float32
    layer.weight.fill_(6e4)
    x = torch.full((2, 4096), 65504.0)  # all products at their largest, with one sign
    assert error(scaled(layer, x), run_in_fp32(layer, x)) < 2**-10 and layer(x.half()).isinf().all()
    layer.bias.copy_(torch.randn(8))
    layer.weight.zero_()
    assert torch.equal(scaled(layer, x * 1e30), layer.bias.float().expand(2, 8))


@pytest.mark.parametrize("given", [torch.float32, BF16])
@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**40])
def test_values_are_scaled_before_the_cast_to_fp16(given: torch.dtype, factor: float) -> None:
    right = torch.tensor([1.5, -3.0, 0.0]).half()
    made = scaled_to((right.double() / factor).to(given), torch.tensor(factor), FP16)
    assert made.dtype is FP16 and torch.equal(made, right)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_every_kind_of_convolution_is_near_fp32(kind: Any, groups: int) -> None:
    torch.manual_seed(0)
    layer = kind(4, 6, 3, groups=groups, padding=1, stride=2).half().requires_grad_(False)
    dimensions = layer.weight.ndim - 2
    x = torch.randn(2, 4, *[7] * dimensions) * torch.tensor([1e9, 1e-3]).view(-1, *[1] * (dimensions + 1))
    made, exact = scaled(layer, x), run_in_fp32(layer, x)
    assert all(error(made[sample], exact[sample]) < 1e-3 for sample in range(2))
    assert error(scaled(layer, x[0]), exact[0]) < 1e-3, "without a batch"
    half = x[1:].half()
    assert torch.equal(scaled(layer, half), scaled(layer, half.float()))


@pytest.mark.parametrize("loud", [("query",), ("key",), ("value",), ("query", "key", "value")])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "bias", "grouped", "cross", "scale"])
def test_attention_handles_heads_of_any_magnitude(case: str, loud: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    heads, keys = 2 if case == "grouped" else 4, 7 if case in ("cross", "mask", "bias") else 5
    given = {"query": torch.randn(2, 4, 5, 16), "key": torch.randn(2, heads, keys, 16)}
    given["value"] = torch.randn(2, heads, keys, 16)
    if "value" in loud:
        given["value"][:, 0] *= 2.0**30
    if loud != ("value",):
        other = {"query": "key", "key": "query"}[loud[0]]
        given[loud[0]] *= 2.0**20
        given[other] *= 2.0**-20
    masks = {"mask": (torch.arange(keys) < 4).expand(5, keys), "bias": torch.randn(5, keys)}
    more: dict[str, Any] = {"causal": {"is_causal": True}, "grouped": {"enable_gqa": True}, "scale": {"scale": 0.5}}
    named = given | ({"attn_mask": masks[case]} if case in masks else more.get(case, {}))
    exact, made = F.scaled_dot_product_attention(**named), scaled(F.scaled_dot_product_attention, **named)
    by_head = [slice(1, None)] if case == "grouped" else [slice(head, head + 1) for head in range(heads)]
    assert all(error(made[:, part], exact[:, part]) < 2e-3 for part in by_head)


@pytest.mark.parametrize("mask", [None, torch.full((6, 9), torch.finfo(torch.float32).min)])
def test_attention_with_huge_logits_or_min_float_mask_is_near_fp32(mask) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 6, 16) * 1e6, torch.randn(1, 2, 9, 16) * 1e6, torch.randn(1, 2, 9, 16)
    exact = F.scaled_dot_product_attention(query, key, value, mask)
    assert error(scaled(F.scaled_dot_product_attention, query, key, value, mask), exact) < 1e-3


def test_rotary_table_is_bit_equal_to_float32() -> None:
    positions, frequencies = torch.arange(4096.0).unsqueeze(1), 10000.0 ** -torch.linspace(0, 1, 8).unsqueeze(0)
    made = scaled(lambda: torch.cos(positions @ frequencies))
    assert torch.equal(made, torch.cos(positions @ frequencies))


def test_bf16_products_are_not_scaled() -> None:
    layer, x = nn.Linear(8, 4).requires_grad_(False), torch.randn(3, 8)
    expected = F.linear(x.bfloat16(), layer.weight.bfloat16()).float() + layer.bias
    assert torch.equal(scaled(layer, x, dtype=BF16), expected)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_nonfinite_rows_stay_nonfinite_and_others_finite(broken: float) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = broken
    made = scaled(nn.Linear(8, 4).half(), x)
    assert not made[1].isfinite().any() and made[[0, 2]].isfinite().all()


RATIOS = [10.0**decades for decades in (1, 3, 4, 5, 5.5, 6, 6.5, 7, 8, 9, 12, 20, 30)]


def compensated(part: str, ratio: float, stored: torch.dtype, channels: int = 512) -> tuple[nn.Module, torch.Tensor]:
    """Return a layer and its input: one channel is `ratio` times as large, compensated by its weights; or one pixel is;
    or one output is `ratio` times smaller."""
    generator = torch.Generator().manual_seed(0)
    convolves = part == "pixel"
    layer: Any = nn.Conv2d(16, 8, 3, padding=1) if convolves else nn.Linear(channels, 16, bias=False)
    layer.requires_grad_(False).weight.copy_(torch.randn(layer.weight.shape, generator=generator) / channels**0.5)
    x = torch.randn((1, 16, 9, 9) if convolves else (7, channels), generator=generator)
    if part == "channel":
        x[:, 3] *= ratio
        layer.weight[:, 3] /= ratio
    elif part == "output":
        layer.weight[3] /= ratio
    elif convolves:
        x[:, :, 1, 1] *= ratio
        layer.bias.zero_()
    return layer.to(stored), x


@pytest.mark.parametrize("stored", [FP16, BF16, torch.float32])
@pytest.mark.parametrize("part", ["channel", "pixel", "output"])
def test_small_values_beside_huge_ones_are_as_near_as_bf16(part: str, stored: torch.dtype) -> None:
    for ratio in RATIOS:
        layer, x = compensated(part, ratio, stored)
        in_bf16 = copy.deepcopy(layer).to(BF16)(x.bfloat16())
        exact, made, in_bf16 = (each.double() for each in (run_in_fp32(layer, x), scaled(layer, x), in_bf16))
        small = {"channel": ..., "pixel": (..., slice(4, None), slice(4, None)), "output": (..., 3)}[part]
        if exact[small].any():
            exact, made, in_bf16 = exact[small], made[small], in_bf16[small]
        assert error(made, exact) <= error(in_bf16, exact), ratio


@pytest.mark.parametrize("part", ["channel", "pixel"])
def test_device_products_are_near_fp32_or_not_finite(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the guard detects it, in later calls too."""
    monkeypatch.setattr(scaled_products, "_is_on_host", lambda _: False)
    for ratio in RATIOS:
        layer, x = compensated(part, ratio, FP16)
        exact, products = run_in_fp32(layer, x), ScaledHalfMatmulMode(FP16)
        small = (..., slice(4, None), slice(4, None)) if part == "pixel" else ...
        for _ in range(2):
            made = run_in(products, layer, (x,), {})
            is_finite = bool(made.isfinite().all())
            assert error(made[small], exact[small]) < 2e-3 if is_finite else ratio > 1e5, ratio


def copied_to_in_inference_mode(weight: torch.Tensor) -> None:
    with torch.inference_mode():
        weight.data.copy_(weight * 1e4)  # ComfyUI's hooks change weights like this during a run


CHANGES = {
    "multiplied": lambda weight: weight.mul_(1e4),
    "multiplied through data": lambda weight: weight.data.mul_(1e4),
    "replaced through data": lambda weight: setattr(weight, "data", weight.data * 1e4),
    "copied to in inference mode": copied_to_in_inference_mode,
}


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weight_is_read_again(change: Any, kind: Any, in_inference_mode: bool) -> None:
    with torch.inference_mode(in_inference_mode):
        layer = (kind(8, 4) if kind is nn.Linear else kind(8, 4, 1)).half().requires_grad_(False)
        x, products = torch.randn(3, 8) if kind is nn.Linear else torch.randn(3, 8, 5), ScaledHalfMatmulMode(FP16)
        run_in(products, layer, (x,), {})
        change(layer.weight)
        for _ in range(2):
            assert error(run_in(products, layer, (x,), {}), run_in_fp32(layer, x)) < 1e-3


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(8, 4), (0, 8)),
        (lambda: nn.Linear(8, 4), (2, 0, 8)),
        (lambda: nn.Linear(0, 4), (3, 0)),
        (lambda: nn.Linear(8, 0), (3, 8)),
        (lambda: nn.Linear(0, 4, bias=False), (0, 0)),
        (lambda: nn.Conv2d(4, 4, 3, padding=1), (0, 4, 5, 5)),
        (lambda: nn.ConvTranspose2d(4, 4, 2), (0, 4, 5, 5)),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layer_with_empty_tensors_equals_fp32(make: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, x = make().half().requires_grad_(False), torch.randn(shape)
    made, expected = scaled(layer, x, dtype=dtype), run_in_fp32(layer, x)
    assert made.dtype is torch.float32 and torch.equal(made, expected)


def test_weight_cast_is_asked_for_fp16_in_products() -> None:
    asked: list[Any] = []

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        asked.append(dtype)
        return weight.to(dtype)

    moves = OneOperation(cast, lambda products, weight, _dtype: ((weight, products), {}))
    weight, x = torch.randn(4, 8).bfloat16(), torch.randn(3, 8)

    def layer() -> torch.Tensor:
        return F.linear(x, moves(weight, BF16))

    assert error(scaled(layer), run_in_fp32(layer)) < 1e-3
    assert asked == [FP16, torch.float32]
