"""Shallow copies of modules that a library has hooked: each runs its replacements, and hooks do not accumulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.on_disk import hooked
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules, reporting, structural_copy, with_forward
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, GlmConfig, GlmModel, T5Config, T5EncoderModel

SMALL: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
MODELS: dict[str, tuple[Callable[[], Any], str, str]] = {  # how to build it, a layer of a block, and the block
    "GLM": (
        lambda: GlmModel(GlmConfig(**SMALL, **SIZES, num_key_value_heads=1, head_dim=8)),
        "layers.1.mlp.down_proj",
        "layers.1",
    ),
    "T5": (
        lambda: T5EncoderModel(T5Config(**SMALL, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2)),
        "encoder.block.1.layer.1.DenseReluDense.wo",
        "encoder.block.1",
    ),
    "CLIP": (
        lambda: CLIPTextModel(CLIPTextConfig(**SMALL, **SIZES)),
        "encoder.layers.1.mlp.fc2",
        "encoder.layers.1",
    ),
}


def calling(layer: nn.Module) -> nn.Module:
    return with_forward(layer, lambda *args, **kwargs: layer(*args, **kwargs))


COPIES: dict[str, Callable[[nn.Module, str, str], nn.Module]] = {
    "of a layer": lambda module, layer, _block: replace_submodules(module, {layer: calling}),
    "of a block": lambda module, _layer, block: replace_submodules(module, {block: calling}),
    "of everything": lambda module, _layer, _block: structural_copy(module),
    "of a copy": lambda module, layer, _block: reporting(
        replace_submodules(module, {layer: calling}), dtype=torch.float32
    ),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_each_copy_records_output_of_each_layer_once(name: str, kind: str) -> None:
    make, layer, block = MODELS[name]
    torch.manual_seed(0)
    model = hooked(make().eval())
    tokens = torch.arange(3, 11)[None]
    with torch.no_grad():
        copies = [COPIES[kind](model, layer, block) for _ in range(3)]
        each = [copied(input_ids=tokens, output_hidden_states=True).hidden_states for copied in (*copies, model)]
    assert len({id(states) for states in each}) == 4 and len(each[0]) == 4
    assert all(torch.equal(one, other) for states in each[1:] for one, other in zip(states, each[0], strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def negated(layer: nn.Module) -> nn.Module:
    return with_forward(layer, torch.neg)


@pytest.mark.parametrize(
    "make_copy",
    [
        lambda block: replace_submodules(block, {"0.inner": negated})[0],
        lambda block: replace_submodules(reporting(block[0], dtype=torch.float32), {"inner": negated}),
        lambda block: replace_submodules(structural_copy(block), {"0.inner": negated})[0],
        lambda block: replace_submodules(
            replace_submodules(block, {"0.inner": negated}), {"0.inner": lambda layer: layer}
        )[0],
    ],
)
def test_forward_that_is_attribute_is_bound_to_copy(make_copy: Callable[[Any], Any]) -> None:
    """As transformers 4 does: its own method, bound to the layer."""
    blocks: Any = nn.Sequential(Block())
    blocks[0].forward = blocks[0].forward
    assert make_copy(blocks)(torch.ones(1)) == -1
    assert blocks(torch.ones(1)) == 1


def test_custom_forward_stays_in_copy() -> None:
    block: Any = Block()
    block.forward = lambda x: x + 1
    assert reporting(block, dtype=torch.float32)(torch.ones(1)) == 2
