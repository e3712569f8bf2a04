"""fp8 on a CPU: torchao's tensor and PyTorch's CPU kernel, without torchao's check for a suitable card."""

from __future__ import annotations

import torch
from comfyui_onediff_guard.precision.quantised import CONFIGS


def fp8_weight(layer: torch.nn.Linear, **changes: object) -> torch.Tensor:
    """Return a layer's weight, quantised by torchao with this pack's configuration. changes: of its fields."""
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor, QuantizeTensorToFloat8Kwargs

    config = CONFIGS["fp8"](layer.weight.device)
    for name, value in changes.items():
        setattr(config, name, value)
    activation, weight = config.granularity
    with torch.inference_mode(False), torch.no_grad():
        return Float8Tensor.from_hp(
            layer.weight.detach(),
            float8_dtype=config.weight_dtype,
            granularity=weight,
            mm_config=config.mm_config,
            kernel_preference=config.kernel_preference,
            act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
                config.activation_dtype,
                activation,
                hp_value_lb=config.activation_value_lb,
                hp_value_ub=config.activation_value_ub,
                kernel_preference=config.kernel_preference,
            ),
        )
