"""Which weights come together, and how many of them are on the device at once: told from modules without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.weights.offload import BlockOffload, Offload, Parts
from comfyui_onediff_guard.pipelines.weights.placement import bytes_of
from diffusers import CogVideoXTransformer3DModel


def most_on_device(component: torch.nn.Module, offload: Offload, blocks: tuple[str, ...] = ()) -> int:
    return Parts.of(component, offload, blocks).most_bytes(ahead=offload is Offload.GROUP)


def blocks(*widths: int) -> Any:
    module: Any = torch.nn.Module()
    module.embed = torch.nn.Linear(3, 1, bias=False)
    module.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(1, width)) for width in widths)
    module.register_buffer("scale", torch.ones(1))
    return module


@pytest.mark.parametrize(
    ("offload", "values"),
    [
        (Offload.GROUP, 3 + 1 + 2 * (5 + 2)),  # neighbours: not 5 + 4
        (Offload.SEQUENTIAL, 1 + 2 * 5),
    ],
)
def test_what_is_on_the_device_at_once(offload: Offload, values: int) -> None:
    with torch.device("meta"):
        module = blocks(1, 5, 2, 4)
    assert most_on_device(module, offload, ("blocks",)) == most_on_device(module, offload) == 4 * values


def test_blocks_that_share_a_weight_come_together_and_it_counts_once() -> None:
    with torch.device("meta"):
        module = blocks(2, 3, 4)
    module.blocks[2].append(module.blocks[0][0])
    parts = Parts.of(module, Offload.GROUP)
    assert parts.places == {"blocks.0": 0, "blocks.1": 1, "blocks.2": 0}
    assert parts.n_bytes == [4 * (4 + 8), 4 * 6]
    assert most_on_device(module, Offload.GROUP) == bytes_of(module)


def test_of_cogvideox_5b_as_published() -> None:
    with torch.device("meta"):
        denoiser = CogVideoXTransformer3DModel(
            num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True
        )
    denoiser.to(torch.bfloat16)
    whole = bytes_of(denoiser)
    group = most_on_device(denoiser, Offload.GROUP, COGVIDEOX.blocks)
    assert round(whole / 1e9, 1) == 11.1
    assert 2 / 42 < group / whole < 2.6 / 42
    assert most_on_device(denoiser, Offload.SEQUENTIAL, COGVIDEOX.blocks) < 0.5 * group


def test_what_comes_is_what_was_told() -> None:
    """On a device without streams, where nothing comes ahead."""
    module = blocks(1, 5, 2, 4)
    sequential = BlockOffload(module, Offload.SEQUENTIAL, torch.device("cpu"))
    assert sequential.most_bytes == most_on_device(module, Offload.SEQUENTIAL)
    group = BlockOffload(module, Offload.GROUP, torch.device("cpu"))
    assert group.most_bytes == Parts.of(module, Offload.GROUP).most_bytes(ahead=False)
