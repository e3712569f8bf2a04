"""What a text encoder makes of prompts, one run after another, is what it makes of them on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from card_faults import opened
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.weights import components as stores

PROMPTS = ("a red kite", "a blue kite over the sea", "a red kite")


@pytest.fixture(autouse=True)
def stores_of_its_own(card: Any) -> None:
    stores._STORES.clear()


def encoded(model: str, offload: str, device: str) -> list[torch.Tensor]:
    handle, found = opened(model, offload, device=torch.device(device)), []
    for prompt in PROMPTS:
        handle.store.prompts.clear()
        found += encode_prompts(handle, [prompt, "grey"])[0]
    handle.store.empty()
    stores._STORES.clear()
    return found


@pytest.mark.parametrize("offload", ["none", "model", "group", "sequential"])
@pytest.mark.parametrize("model", ["2b", "cogview4", "wan"])
def test_each_run_encodes_prompts_alike(model: str, offload: str) -> None:
    made, exact = encoded(model, offload, "cuda"), encoded(model, "none", "cpu")
    assert torch.equal(exact[0], exact[4]) and not torch.equal(exact[0], exact[2])
    assert [torch.equal(one, other) for one, other in zip(made, exact, strict=True)] == [True] * len(exact)
