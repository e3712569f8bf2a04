"""ComfyUI's node search finds the right nodes by users' words; there are few nodes with few visible inputs."""

from __future__ import annotations

import inspect

import pytest
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

EXPECTED = {
    "black": {"NaN Guard", "NaN Guard (native)", "Numerics Probe", "Self-Test"},
    "black video": {"NaN Guard", "Decode Latents", "Sample CogVideoX", "Sample Stable Video Diffusion (SVD)"},
    "black image": {"NaN Guard", "NaN Guard (native)", "Decode Latents", "Sample CogView"},
    "NaN": {"NaN Guard", "NaN Guard (native)", "Numerics Probe", "Numerics Probe (MODEL)"},
    "overflow": {"NaN Guard", "NaN Guard (native)", "Numerics Probe", "Numerics Probe (MODEL)"},
    "fp16": {"Self-Test", "NaN Guard", "Load Pipeline"},
    "bf16": {"Self-Test", "NaN Guard", "Load Pipeline"},
    "fp32": {"Self-Test", "NaN Guard", "Load Pipeline"},
    "precision": {"Self-Test", "NaN Guard (native)", "Load Pipeline"},
    "SVD": {"Load Pipeline", "Sample Stable Video Diffusion (SVD)"},
    "torch.compile": {"OneDiff Compile"},
    "T5": {"Encode Prompt"},
    "LoRA": {"Load LoRA"},
}


@pytest.mark.parametrize("term", EXPECTED)
def test_search_term_finds_expected_nodes(term: str) -> None:
    found = {
        NODE_DISPLAY_NAME_MAPPINGS[name]
        for name, cls in NODE_CLASS_MAPPINGS.items()
        if any(term.lower() in text.lower() for text in (NODE_DISPLAY_NAME_MAPPINGS[name], *cls.SEARCH_ALIASES))
    }
    assert found >= EXPECTED[term]


def test_every_node_has_its_own_search_aliases(root) -> None:
    """As ComfyUI reads them: a list of strings in the class itself."""
    for cls in NODE_CLASS_MAPPINGS.values():
        own = cls.__dict__["SEARCH_ALIASES"]
        assert isinstance(own, list) and len(own) == len({alias.lower() for alias in own}) >= 3
        assert all(isinstance(alias, str) and alias.strip() == alias != "" for alias in own)


def test_at_most_15_nodes_show_at_most_7_widgets_each() -> None:
    """Counts inputs that are typed or chosen. Others are wired, or advanced, which pages with Nodes 2.0 fold."""
    assert len(NODE_CLASS_MAPPINGS) <= 15
    for name, cls in NODE_CLASS_MAPPINGS.items():
        inputs = {**cls.INPUT_TYPES()["required"], **cls.INPUT_TYPES().get("optional", {})}
        widgets = [
            key
            for key, (kind, *options) in inputs.items()
            if isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN")
            if not (options and (options[0].get("advanced") or options[0].get("forceInput")))
        ]
        assert len(widgets) <= 7, (name, widgets)


def test_omitted_optional_input_has_default_of_widget() -> None:
    """In prompts through the API nobody fills in optional inputs."""
    for name, cls in NODE_CLASS_MAPPINGS.items():
        parameters = inspect.signature(getattr(cls, cls.FUNCTION)).parameters
        for key, (kind, *options) in cls.INPUT_TYPES().get("optional", {}).items():
            if key not in parameters or not options or "default" not in options[0]:
                continue
            assert parameters[key].default == options[0]["default"], (name, key, kind)
