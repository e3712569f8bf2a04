"""ComfyUI's node for torch.compile, with the compiler that people use, before NaN Guard (native) and after it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import difference, guarded
from native_models import LAYOUTS, sample, with_its_twin

AS_SD15 = ("sdxl", "svd")  # of its class, which takes inductor minutes
ROUNDED = ("mage_flow",)  # to bf16, on purpose, which inductor leaves out, with a guard and without


@pytest.mark.parametrize("family", [name for name in LAYOUTS if name not in AS_SD15])
def test_a_model_that_inductor_compiled_is_guarded(family: str) -> None:
    model, twin = with_its_twin(family)
    exact = sample(twin)
    rounding = difference(sample(model), exact)
    if family in ROUNDED:
        exact = sample(_compiled(twin))
    for patcher in (guarded(_compiled(model)), _compiled(guarded(model))):
        torch.compiler.reset()
        assert difference(sample(patcher), exact) <= 2 * rounding


def _compiled(patcher: Any) -> Any:
    return import_module("comfy_extras.nodes_torch_compile").TorchCompileModel.execute(patcher, "inductor").args[0]
