"""What a current ComfyUI says, by its own `execution.validate_inputs`, of values that a node cannot use."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from legs import ROOT, Leg

ASK = """
import asyncio, importlib.util, json, sys
root, checkout, asked = sys.argv[1:4]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, checkout)
import comfy.options
comfy.options.enable_args_parsing()
import execution, nodes
spec = importlib.util.spec_from_file_location("onediff_guard", root + "/__init__.py", submodule_search_locations=[root])
pack = sys.modules["onediff_guard"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
nodes.NODE_CLASS_MAPPINGS.update(pack.NODE_CLASS_MAPPINGS)
answers = []
for graph in json.loads(asked):
    valid, errors, _ = asyncio.run(execution.validate_inputs("1", graph, "0", {}))
    answers.append([valid, [[e["type"], e["extra_info"]["input_name"], e["details"]] for e in errors]])
print("ANSWERS" + json.dumps(answers))
"""

VIDEO = {"width": 64, "height": 48, "frames": 9, "steps": 2, "guidance_scale": 6.0, "seed": 0, "scheduler": "DPM",
         "precision": "inherit"}  # fmt: skip
LOADED = {"model": "not-here", "precision": "auto", "backend": "auto", "offload": "none", "accumulation": "auto",
          "hub_id": "", "revision": "", "download": True}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], list[list[str]]]] = {
    "all is well": ("SampleCogVideoX", VIDEO, []),
    "too small": ("SampleCogVideoX", VIDEO | {"width": 0}, [["value_smaller_than_min", "width"]]),
    "too large": ("SampleCogVideoX", VIDEO | {"frames": 2001}, [["value_bigger_than_max", "frames"]]),
    "between two steps": ("SampleCogVideoX", VIDEO | {"width": 90}, [["value_smaller_than_min", "width"]]),
    "frames between two steps": ("SampleCogVideoX", VIDEO | {"frames": 8}, [["value_smaller_than_min", "frames"]]),
    "no number": ("SampleCogVideoX", VIDEO | {"height": "DDIM"}, [["invalid_input_type", "height"]]),
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
    "a model that is not here": ("LoadPipeline", LOADED, []),
    "a LoRA that is not here": (
        "LoadLoRA",
        {"lora": "not-here.safetensors", "strength": 1.0},
        [["custom_validation_failed", "lora"]],
    ),
    "no profile": (
        "NaNGuard",
        {"on_failure": "rerun", "strict": False, "profile": "{"},
        [["custom_validation_failed", "profile"]],
    ),
}


@pytest.fixture(scope="module")
def answers(leg: Leg) -> dict[str, Any]:
    graphs = [{"0": {"class_type": f"OneDiffGuard{name}", "inputs": given}} for name, given, _ in CASES.values()]
    done = subprocess.run(
        [str(leg.python), "-c", ASK, str(ROOT), str(leg.checkout), json.dumps(graphs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ANSWERS" in done.stdout, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.partition("ANSWERS")[2]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_one_input_that_is_wrong_is_marked(answers: dict[str, Any], case: str) -> None:
    """Links are left out here: ComfyUI says of each that it is missing."""
    _, found = answers[case]
    marked = sorted([kind, name] for kind, name, _ in found if kind != "required_input_missing")
    assert marked == sorted(CASES[case][2])
