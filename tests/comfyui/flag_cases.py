"""What is said of flags that a real ComfyUI was started with."""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module, reload
from pathlib import Path
from typing import Any

from memory_cases import import_ours


def case_told() -> dict[str, Any]:
    """The flags in what the loader reports, {flag: effect}, and the report's lines."""
    import_ours()
    import moving
    from comfyui_onediff_guard.comfyui_host import host
    from comfyui_onediff_guard.nodes.report import with_surroundings
    from comfyui_onediff_guard.pipelines.insight.diagnosis import diagnose_pipeline
    from small_families import BUILDERS

    with tempfile.TemporaryDirectory() as folder:
        handle = moving.opened(BUILDERS["2b"](Path(folder) / "2b"), "none", host.placement())
        shown = with_surroundings(diagnose_pipeline(handle))
    flags = {flag["given"]: flag["effect"] for flag in shown.as_dict()["comfyui"]["flags"]}
    return {"flags": flags, "lines": shown.text().splitlines()}


def case_wishes() -> dict[str, Any]:
    """{flag: (what was given, the offload that it asks for)}: ComfyUI's parser reads each anew, since one excludes
    another, --cpu among them."""
    from comfyui_onediff_guard.comfyui_host import host

    found: dict[str, Any] = {}
    before = sys.argv[1:]
    for flag in ("--lowvram", "--novram", "--highvram", "--gpu-only", "--cpu"):
        sys.argv[1:] = [flag]
        reload(import_module("comfy.cli_args"))
        found[flag] = [[each.given for each in host.flags()], host.memory_wish()]
    sys.argv[1:] = before
    reload(import_module("comfy.cli_args"))
    return found
