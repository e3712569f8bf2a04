"""What people type into ComfyUI's node search finds the nodes that help."""

from __future__ import annotations

import pytest
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

FOUND = {
    "black": {"NaN Guard", "NaN Guard (native)", "Numerics Probe", "Precision Report"},
    "black video": {"NaN Guard", "Decode Latents", "Sample CogVideoX", "Sample Stable Video Diffusion (SVD)"},
    "black image": {"NaN Guard", "NaN Guard (native)", "Decode Latents", "Sample CogView"},
    "NaN": {"NaN Guard", "NaN Guard (native)", "Numerics Probe", "Numerics Probe (MODEL)"},
    "overflow": {"NaN Guard", "NaN Guard (native)", "Numerics Probe", "Numerics Probe (MODEL)"},
    "fp16": {"Precision Report", "NaN Guard", "Load Pipeline"},
    "bf16": {"Precision Report", "NaN Guard", "Load Pipeline"},
    "fp32": {"Precision Report", "NaN Guard", "Load Pipeline"},
    "precision": {"Precision Report", "NaN Guard (native)", "Load Pipeline"},
    "SVD": {"Load Pipeline", "Sample Stable Video Diffusion (SVD)"},
    "torch.compile": {"OneDiff Compile"},
    "T5": {"Encode Prompt"},
    "LoRA": {"Load LoRA"},
}


@pytest.mark.parametrize("typed", FOUND)
def test_a_search_finds_what_helps(typed: str) -> None:
    found = {
        NODE_DISPLAY_NAME_MAPPINGS[name]
        for name, cls in NODE_CLASS_MAPPINGS.items()
        if any(typed.lower() in text.lower() for text in (NODE_DISPLAY_NAME_MAPPINGS[name], *cls.SEARCH_ALIASES))
    }
    assert found >= FOUND[typed]


def test_every_node_has_its_own(root) -> None:
    """As ComfyUI reads them: a list of strings, of the class itself."""
    for cls in NODE_CLASS_MAPPINGS.values():
        own = cls.__dict__["SEARCH_ALIASES"]
        assert isinstance(own, list) and len(own) == len({alias.lower() for alias in own}) >= 3
        assert all(isinstance(alias, str) and alias.strip() == alias != "" for alias in own)
