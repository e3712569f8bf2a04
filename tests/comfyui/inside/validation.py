"""ComfyUI's own `execution.validate_inputs` on valid and invalid values of the pack's nodes."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any

import pytest
from in_comfyui import PACK

VIDEO = {"width": 64, "height": 48, "frames": 9, "steps": 2, "guidance_scale": 6.0, "seed": 0, "scheduler": "DPM",
         "precision": "inherit"}  # fmt: skip
LOADED = {"model": "not-here", "precision": "auto", "backend": "auto", "offload": "none", "accumulation": "auto",
          "hub_id": "", "revision": "", "download": True}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], list[list[str]]]] = {
    "valid": ("SampleCogVideoX", VIDEO, []),
    "too small": ("SampleCogVideoX", VIDEO | {"width": 0}, [["value_smaller_than_min", "width"]]),
    "too large": ("SampleCogVideoX", VIDEO | {"frames": 2001}, [["value_bigger_than_max", "frames"]]),
    "between two steps": ("SampleCogVideoX", VIDEO | {"width": 90}, [["value_smaller_than_min", "width"]]),
    "frames between two steps": ("SampleCogVideoX", VIDEO | {"frames": 8}, [["value_smaller_than_min", "frames"]]),
    "not a number": ("SampleCogVideoX", VIDEO | {"height": "DDIM"}, [["invalid_input_type", "height"]]),
    "reordered": (
        "SampleCogVideoX",
        VIDEO | {"width": "DDIM", "scheduler": 720},
        [["invalid_input_type", "width"], ["value_not_in_list", "scheduler"]],
    ),
    "an image too small": (
        "SampleCogView",
        {"width": 64, "height": 32, "steps": 2, "guidance_scale": 5.0, "seed": 0, "precision": "inherit"},
        [["value_smaller_than_min", "height"]],
    ),
    "a model from the hub": ("LoadPipeline", LOADED | {"hub_id": "a/b"}, []),
    "a missing model": ("LoadPipeline", LOADED, []),
    "a missing LoRA": (
        "LoadLoRA",
        {"lora": "not-here.safetensors", "strength": 1.0},
        [["custom_validation_failed", "lora"]],
    ),
    "an invalid profile": (
        "NaNGuard",
        {"on_failure": "rerun", "exact_fp32": False, "profile": "{"},
        [["custom_validation_failed", "profile"]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_comfyui_marks_only_invalid_inputs(case: str) -> None:
    """The inputs have no links, so ComfyUI reports each link as missing; these errors are ignored."""
    name, given, wrong = CASES[case]
    import_module("nodes").NODE_CLASS_MAPPINGS.update(sys.modules[PACK].NODE_CLASS_MAPPINGS)
    graph = {"0": {"class_type": f"OneDiffGuard{name}", "inputs": given}}
    _, errors, _ = asyncio.run(import_module("execution").validate_inputs("1", graph, "0", {}))
    marked = [[error["type"], error["extra_info"]["input_name"]] for error in errors]
    assert sorted(each for each in marked if each[0] != "required_input_missing") == sorted(wrong)
