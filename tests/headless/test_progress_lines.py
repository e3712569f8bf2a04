"""A run's progress where nobody watches: in a file, or in another program's pipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_onediff_guard.headless.commands.cli import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "Load Pipeline.precision": "fp32",
    "Load Pipeline.backend": "eager",
    "Sample CogVideoX.width": 32,
    "Sample CogVideoX.height": 32,
    "Sample CogVideoX.frames": 17,
    "Sample CogVideoX.steps": 2,
    "Decode Latents.tiling": False,
}
STAGES = ["encoding prompt 2 of 2", "step 2/2 · fp32", "decoding part 2 of 2"]


def test_without_a_terminal_a_stage_is_a_line(
    model_folder: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = model_folder("2b")
    workflow = ROOT / "workflows" / "api" / "cogvideox_text_to_video.json"
    arguments = ["run", str(workflow), "--models", str(model.parent), "--out", str(tmp_path)]
    for name, value in {"Load Pipeline.model": model.name, **SMALL}.items():
        arguments += ["--set", f"{name}={json.dumps(value)}"]
    capfd.readouterr()  # what making the model said
    assert main(arguments) == 0
    told = capfd.readouterr().err
    assert "\r" not in told
    lines = told.splitlines()
    assert [line for line in lines if not line.startswith("node ")] == STAGES, "beside the names of nodes"
