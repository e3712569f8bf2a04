"""All layers scaled with quantised weights: by a kernel for their format, or dequantised."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from comfyui_onediff_guard.precision.upcast import run_in, run_in_fp32
from guards import error
from torch import nn
from torch.nn import functional as F

FP16, BF16 = torch.float16, torch.bfloat16


class Quantised(torch.Tensor):
    """An int8 weight that reports fp16. It supports only the operations tested here."""

    codes: torch.Tensor
    scale: float
    dequantisations = 0

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=FP16)
        made.codes, made.scale = codes, scale
        return made

    def dequantize(self) -> torch.Tensor:
        Quantised.dequantisations += 1
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)
        return cls(args[0].codes, args[0].scale)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.to(FP16).requires_grad_(False)
        codes = (self.down.weight.float() * 1000).round().clamp(-127, 127).to(torch.int8)
        self.down.weight = nn.Parameter(Quantised(codes, 1e-3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Kernel:
    """Multiplies rows rounded to 15 bits. It takes a nonfinite row as all ones."""

    def __init__(self) -> None:
        self.calls = 0

    def of(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        assert isinstance(weight, Quantised)
        return lambda rows: self.product(rows, weight)

    def product(self, rows: torch.Tensor, weight: Any) -> torch.Tensor:
        self.calls += 1
        assert rows.ndim == 2 and rows.dtype is torch.float32 and rows.is_contiguous()
        finite = rows.isfinite().all(-1, keepdim=True)
        rows = torch.where(finite, rows, 1.0)
        largest = rows.abs().amax(-1)
        assert ((largest == 0) | ((largest >= 128) | ~finite[:, 0]) & (largest < 256)).all()
        return (rows * 64).round() / 64 @ (weight.codes.float() * weight.scale).T


def latents(gain: float = 1.0) -> torch.Tensor:
    return gain * torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _reset_dequantisations() -> None:
    Quantised.dequantisations = 0


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_each_step_uses_the_quantised_kernel(dtype: torch.dtype) -> None:
    """The first step, and later steps with its scales."""
    network, kernel = Network(), Kernel()
    exact = run_in_fp32(network, latents())
    Quantised.dequantisations = 0
    products = LearnedProducts(dtype, kernel_of=kernel.of)
    for step in range(1, 4):
        made = products.run(network, latents())
        assert error(made, exact) <= {FP16: 1e-3, BF16: 1e-2}[dtype] and kernel.calls == step
    assert (products._planned is not None) == (dtype is FP16)
    assert Quantised.dequantisations == 0


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_weight_is_dequantised_without_a_kernel(dtype: torch.dtype) -> None:
    network = Network()
    exact = run_in_fp32(network, latents())
    Quantised.dequantisations = 0
    for kernel_of in ({}, {"kernel_of": lambda _weight: None}):
        products = LearnedProducts(dtype, **kernel_of)
        for _step in range(2):
            assert error(products.run(network, latents()), exact) <= {FP16: 1e-3, BF16: 1e-2}[dtype]
    assert Quantised.dequantisations == 4


def test_fp32_rerun_dequantises_the_weight() -> None:
    run_in_fp32(Network(), latents())
    assert Quantised.dequantisations == 1


@pytest.mark.parametrize("gains", [(1.0, 1.0), (1e-20, 1e30), (0.0, 1e6), (math.inf, 1.0), (math.nan, 1e-6)])
@pytest.mark.parametrize("stored", [torch.float32, FP16, BF16])
def test_rows_are_scaled_and_nonfinite_rows_stay(gains: tuple[float, float], stored: torch.dtype) -> None:
    layer, kernel = Network().down, Kernel()
    layer.bias.zero_()
    drawn = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    x = (drawn * torch.tensor(gains)[:, None]).to(stored)
    made = run_in(ScaledHalfMatmulMode(FP16, kernel.of), layer, (x,), {})
    exact = x.double() @ layer.weight.dequantize().double().T
    assert made.dtype is torch.float32 and kernel.calls == 1
    for row, right in zip(made, exact, strict=True):
        if right.isfinite().all():
            assert (row - right).norm() <= 1e-3 * right.norm()
        else:
            assert not row.isfinite().any()


def test_empty_input_does_not_call_the_kernel() -> None:
    layer, kernel = Network().down, Kernel()
    made = run_in(ScaledHalfMatmulMode(FP16, kernel.of), layer, (torch.zeros(0, 64),), {})
    assert made.shape == (0, 32) and kernel.calls == 0
