"""Every family compiled by ComfyUI's node with inductor, before the guard and after it: run in ComfyUI's interpreter,
judged in test_native_inductor.py."""

from __future__ import annotations

import traceback
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import node
from native_models import LAYOUTS, Layout, in_fp32, make_model, sample

AS_SD15 = ("sdxl", "svd")  # of its class, which takes inductor minutes


def case_inductor() -> dict[str, Any]:
    found: dict[str, Any] = {"families": [name for name in LAYOUTS if name not in AS_SD15]}
    for name in found["families"]:
        found |= {f"{name}, {how}": made for how, made in _tried(LAYOUTS[name]).items()}
    return found


def _tried(layout: Layout) -> dict[str, Any]:
    """One family that fails leaves the others their figures."""
    try:
        return {"error": "", **_ran(layout)}
    except Exception:  # noqa: BLE001 - the test shows it
        return {"error": traceback.format_exc()}


def _ran(layout: Layout) -> dict[str, Any]:
    model = make_model(layout)
    made = {"fp32": sample(in_fp32(model, layout), layout), "plain": sample(model, layout)}
    for how, patcher in (
        ("before", node("model", _compiled(model))),
        ("after", _compiled(node("model", model))),
    ):
        torch.compiler.reset()
        made[how] = sample(patcher, layout)
    return made


def _compiled(patcher: Any) -> Any:
    return import_module("comfy_extras.nodes_torch_compile").TorchCompileModel.execute(patcher, "inductor").args[0]
