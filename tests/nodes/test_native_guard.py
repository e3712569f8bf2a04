"""NaN Guard (native), without ComfyUI: its outputs by what is wired to it, and errors for missing wires."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from comfyui_onediff_guard.nodes.native_guard import NaNGuardNative
from comfyui_onediff_guard.trust.message import BadInput
from fake_comfy import BareVae


class Blocker:
    def __init__(self, message: str):
        self.message = message


def prompt(**inputs: Any) -> dict[str, Any]:
    """A prompt whose node 2 has these inputs."""
    return {"1": {"class_type": "OneDiffGuardNaNGuardNative", "inputs": {}}, "2": {"class_type": "X", "inputs": inputs}}


NOT_WIRED = {  # name → (wired VAE, prompt, message)
    "model not wired": (
        BareVae(),
        prompt(model=["1", 0]),
        "no model to output: its input 'model' is not connected",
    ),
    "nothing wired": (None, prompt(), "NaN Guard \\(native\\) has no input"),
}


@pytest.mark.parametrize("name", NOT_WIRED)
def test_missing_wire_is_refused_before_computing(name: str) -> None:
    vae, graph, message = NOT_WIRED[name]
    with pytest.raises(BadInput, match=message):
        NaNGuardNative().apply(vae=vae, node_id="1", prompt=graph)


@pytest.mark.parametrize("graph", [None, {}, prompt(vae=["1", 1]), prompt(model=["3", 0]), prompt(model="1")])
def test_unused_output_needs_no_wire(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire that is added later finds the node in ComfyUI's cache: then an ExecutionBlocker carries the message."""
    vae = BareVae()
    assert NaNGuardNative().apply(vae=vae, node_id="1", prompt=graph)[0] is None
    monkeypatch.setitem(sys.modules, "comfy_execution.graph_utils", module := ModuleType("graph_utils"))
    module.ExecutionBlocker = Blocker  # pyright: ignore[reportAttributeAccessIssue]
    model, guarded = NaNGuardNative().apply(vae=vae, node_id="1", prompt=graph)
    assert "Connect it." in model.message
    assert guarded is not vae and guarded.first_stage_model is not vae.first_stage_model
