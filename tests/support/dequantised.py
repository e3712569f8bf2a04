"""Quantised layers computed in float32 from dequantised values: the reference error for a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.quantised import QuantisedLinear
from torch.nn import functional as F


def product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., inputs] times a torchao weight [outputs, inputs] → float32 [..., outputs]."""
    from torchao.quantization.quantize_ import common

    quantised: Any = common._choose_quant_func_and_quantize_tensor
    values = quantised(x, weight.act_quant_kwargs).dequantize(torch.float32)
    return F.linear(values, weight.dequantize(torch.float32), None if bias is None else bias.float())


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return product(x, layer.quantised_weight, layer.bias).to(x.dtype)


def dequantise(patch: pytest.MonkeyPatch) -> None:
    """Make quantised layers compute this way."""
    patch.setattr(QuantisedLinear, "forward", _forward)
