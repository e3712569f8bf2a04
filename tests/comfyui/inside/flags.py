"""The report on ComfyUI's start flags, here --reserve-vram 2 --fp32-vae --fast fp16_accumulation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from in_comfyui import OURS, import_ours

import_ours()
host, flags = import_module(f"{OURS}.comfyui_host.host"), import_module(f"{OURS}.comfyui_host.flags")
report, diagnosis = import_module(f"{OURS}.nodes.report"), import_module(f"{OURS}.pipelines.insight.diagnosis")


def test_report_lists_start_flags_with_their_effect(tmp_path: Path) -> None:
    model = import_module("small_families").BUILDERS["2b"](tmp_path / "2b")
    handle = import_module("moving").opened(model, "none", host.placement())
    loader_report = report.with_surroundings(diagnosis.diagnose_pipeline(handle))
    assert {flag["given"]: flag["effect"] for flag in loader_report.as_dict()["comfyui"]["flags"]} == {
        "--reserve-vram 2": flags.HONOURED,
        "--fp32-vae": flags.NO_EFFECT,
        "--fast fp16_accumulation": flags.HONOURED,
    }
    lines = loader_report.text().splitlines()
    assert any("no effect: choose precision 'fp32' at Decode Latents" in line for line in lines)
    assert max(map(len, lines)) <= 96
