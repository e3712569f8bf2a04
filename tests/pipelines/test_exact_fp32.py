"""Precision fp32 with `exact_fp32`: nothing of a run may take TF32, in whatever stage it is computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import shared_models
import torch
from device_matrix import Leg, ran
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {torch.ops.aten.convolution, torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}
LEG = Leg("fp32", "fp32", exact_fp32=True, steps=2, sizes="small")


class Settings(TorchDispatchMode):
    """Counts the convolutions and products by whether they may take TF32."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            switch = torch.backends.cudnn if func.overloadpacket == torch.ops.aten.convolution else None
            allowed = switch.allow_tf32 if switch else torch.get_float32_matmul_precision() != "highest"
            self.seen[func.overloadpacket.__name__, allowed] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "svd", "wan"])
def test_no_stage_takes_tf32(model):
    with Settings() as settings:
        list(ran(shared_models.model_folder(model, "none"), torch.device("cpu"), LEG))
    assert [each for each in settings.seen if each[1]] == []
    assert settings.seen["convolution", False] and settings.seen["addmm", False]
