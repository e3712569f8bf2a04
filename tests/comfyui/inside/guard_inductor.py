"""ComfyUI's TorchCompileModel node with inductor, before and after NaN Guard (native)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import difference, guarded
from native_models import LAYOUTS, sample, with_fp32_twin

AS_SD15 = ("sdxl", "svd")  # same class as sd15, which takes inductor minutes
ROUNDED = ("mage_flow",)  # it rounds to bf16 on purpose; inductor removes this, with and without a guard


@pytest.mark.parametrize("family", [name for name in LAYOUTS if name not in AS_SD15])
def test_inductor_compiled_model_is_near_fp32_with_guard(family: str) -> None:
    model, twin = with_fp32_twin(family)
    exact = sample(twin)
    rounding = difference(sample(model), exact)
    if family in ROUNDED:
        exact = sample(_compiled(twin))
    for patcher in (guarded(_compiled(model)), _compiled(guarded(model))):
        torch.compiler.reset()
        assert difference(sample(patcher), exact) <= 2 * rounding


def _compiled(patcher: Any) -> Any:
    return import_module("comfy_extras.nodes_torch_compile").TorchCompileModel.execute(patcher, "inductor").args[0]
