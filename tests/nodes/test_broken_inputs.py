"""Non-finite inputs of a native model are named in users' words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.model_calls import _broken

FINITE = torch.zeros(4)
BROKEN = torch.tensor([0.0, math.nan, math.inf, 1.0])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": FINITE, "c_crossattn": None}, ""),
        ({"x": BROKEN, "c_crossattn": BROKEN}, "latents with 2"),
        ({"x": FINITE, "c_concat": BROKEN}, "latents to start from with 2"),
        ({"x": FINITE, "c_crossattn": [FINITE, BROKEN]}, "a prompt with 2"),
        ({"x": FINITE, "ref_latents": [BROKEN, BROKEN]}, "condition 'ref_latents' with 4"),
        ({"control": {"input": [FINITE, None, BROKEN], "output": [BROKEN]}}, "a ControlNet's residuals with 4"),
        ({"x": FINITE, "attention_mask": torch.ones(4, dtype=torch.bool)}, ""),
    ],
)
def test_first_non_finite_input_is_named_with_its_count(inputs: dict[str, Any], message: str) -> None:
    assert _broken(inputs) == message
