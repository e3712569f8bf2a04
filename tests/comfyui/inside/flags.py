"""What is said of flags that a real ComfyUI was started with: --reserve-vram 2 --fp32-vae --fast fp16_accumulation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from in_comfyui import OURS, import_ours

import_ours()
host, flags = import_module(f"{OURS}.comfyui_host.host"), import_module(f"{OURS}.comfyui_host.flags")
report, diagnosis = import_module(f"{OURS}.nodes.report"), import_module(f"{OURS}.pipelines.insight.diagnosis")


def test_the_report_names_what_it_was_started_with(tmp_path: Path) -> None:
    model = import_module("small_families").BUILDERS["2b"](tmp_path / "2b")
    handle = import_module("moving").opened(model, "none", host.placement())
    shown = report.with_surroundings(diagnosis.diagnose_pipeline(handle))
    assert {flag["given"]: flag["effect"] for flag in shown.as_dict()["comfyui"]["flags"]} == {
        "--reserve-vram 2": flags.HONOURED,
        "--fp32-vae": flags.NO_EFFECT,
        "--fast fp16_accumulation": flags.HONOURED,
    }
    lines = shown.text().splitlines()
    assert any("no effect: choose precision 'fp32' at Decode Latents" in line for line in lines)
    assert max(map(len, lines)) <= 96
