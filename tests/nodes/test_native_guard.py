"""NaN Guard (native) by what is wired to it, without ComfyUI: what it puts out, and what it says of a missing wire."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from comfyui_onediff_guard.nodes.native import NaNGuardNative
from comfyui_onediff_guard.trust.message import BadInput


class Network:
    def decode(self, latents: Any) -> Any: ...

    encode = decode


class Vae:
    def __init__(self) -> None:
        self.first_stage_model = Network()

    def decode(self, latents: Any) -> Any: ...

    decode_tiled = encode = encode_tiled = decode


class Blocker:
    def __init__(self, message: str):
        self.message = message


def prompt(**inputs: Any) -> dict[str, Any]:
    """With a node 2 that takes these."""
    return {"1": {"class_type": "OneDiffGuardNaNGuardNative", "inputs": {}}, "2": {"class_type": "X", "inputs": inputs}}


NOT_WIRED = {  # what the prompt takes from a guard that has a VAE, or nothing → what is said
    "a model that it has not": (Vae(), prompt(model=["1", 0]), "no model, since none is wired to its input 'model'"),
    "nothing wired": (None, prompt(), "Nothing is wired to NaN Guard"),
}


@pytest.mark.parametrize("name", NOT_WIRED)
def test_what_is_not_wired_is_told_before_anything_is_computed(name: str) -> None:
    vae, of, says = NOT_WIRED[name]
    with pytest.raises(BadInput, match=says):
        NaNGuardNative().apply(vae=vae, node_id="1", prompt=of)


@pytest.mark.parametrize("of", [None, {}, prompt(vae=["1", 1]), prompt(model=["3", 0]), prompt(model="1")])
def test_what_nobody_takes_need_not_be_wired(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire that is put in later finds the node in ComfyUI's cache: there it is told where it is taken."""
    vae = Vae()
    assert NaNGuardNative().apply(vae=vae, node_id="1", prompt=of)[0] is None
    monkeypatch.setitem(sys.modules, "comfy_execution.graph_utils", module := ModuleType("graph_utils"))
    module.ExecutionBlocker = Blocker  # pyright: ignore[reportAttributeAccessIssue]
    model, guarded = NaNGuardNative().apply(vae=vae, node_id="1", prompt=of)
    assert "Wire one to it." in model.message
    assert guarded is not vae and guarded.first_stage_model is not vae.first_stage_model
