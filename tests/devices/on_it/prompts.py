"""Prompts encoded on the second device, run after run, are bit-equal to the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, bytes_of, bytes_on
from small_runs import CUDA, opened, opened_fresh

PROMPTS = ("a red kite", "a blue kite over the sea", "a red kite")


def encoded(model: str, offload: str, device: str) -> list[torch.Tensor]:
    handle, found = opened_fresh(model, offload, device=torch.device(device)), []
    for prompt in PROMPTS:
        handle.store.prompts.clear()
        found += encode_prompts(handle, [prompt, "grey"])[0]
    return found


@pytest.mark.parametrize("offload", ["none", "model", "group", "sequential"])
@pytest.mark.parametrize("model", ["2b", "cogview4", "wan"])
def test_prompts_are_bit_equal_to_cpu_in_every_run(model: str, offload: str) -> None:
    made, exact = encoded(model, offload, "cuda"), encoded(model, "none", "cpu")
    assert torch.equal(exact[0], exact[4]) and not torch.equal(exact[0], exact[2])
    assert [torch.equal(one, other) for one, other in zip(made, exact, strict=True)] == [True] * len(exact)


@pytest.mark.parametrize(
    ("wish", "offload", "short_of", "stays"),
    [
        ("none", "none", 0, True),
        ("none", "none", 1, False),
        ("none", "model", 0, False),
        ("none", "group", 0, False),
        ("", "none", 0, False),
        ("group", "none", 0, False),
    ],
)
def test_text_encoder_stays_loaded_only_if_all_models_fit(
    card: Any, wish: str, offload: str, short_of: int, stays: bool
) -> None:
    """short_of: bytes missing for the rest of the model beside the encoder."""
    handle = opened("2b", offload)
    placement, store = handle.store.placement, handle.store
    rest = sum(files.n_bytes for name, files in store.model.weights.items() if name != "text_encoder")
    placement.wish, placement.memory = wish, lambda: DeviceMemory(1 << 40, rest - short_of)
    encode_prompts(handle, ["a red kite"])
    encoder = store.components["text_encoder"].module
    on_card = bytes_on(CUDA, encoder)
    card.reset()
    encode_prompts(handle, ["a blue kite"])
    copied = card.counts()["bytes to the device"] >= bytes_of(encoder)
    assert (on_card > 0, copied) == (stays, not stays)
