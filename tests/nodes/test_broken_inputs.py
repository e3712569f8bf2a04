"""What a native model was given that is not finite is named as people know it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.calls import _broken

WHOLE = torch.zeros(4)
BROKEN = torch.tensor([0.0, math.nan, math.inf, 1.0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": WHOLE, "c_crossattn": None}, ""),
        ({"x": BROKEN, "c_crossattn": BROKEN}, "latents with 2"),
        ({"x": WHOLE, "c_concat": BROKEN}, "latents to start from with 2"),
        ({"x": WHOLE, "c_crossattn": [WHOLE, BROKEN]}, "a prompt with 2"),
        ({"x": WHOLE, "ref_latents": [BROKEN, BROKEN]}, "condition 'ref_latents' with 4"),
        ({"control": {"input": [WHOLE, None, BROKEN], "output": [BROKEN]}}, "a ControlNet's residuals with 4"),
        ({"x": WHOLE, "attention_mask": torch.ones(4, dtype=torch.bool)}, ""),
    ],
)
def test_the_first_that_is_not_finite_is_named_with_its_count(given: dict[str, Any], said: str) -> None:
    assert _broken(given) == said
