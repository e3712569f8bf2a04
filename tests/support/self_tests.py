"""Stored self-test results for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from comfyui_onediff_guard.precision.arch import detect
from comfyui_onediff_guard.precision.self_test import CheckResult, SelfTestReport, keep, machine_of

CPU, DAY = torch.device("cpu"), "2026-11-30"


def keep_self_test(folder: Path, *lines: CheckResult, **machine: str) -> Path:
    """Store a self-test of this machine, or of one that differs in `machine`."""
    architecture = detect(CPU)
    facts = machine_of(CPU, architecture) | machine
    result = SelfTestReport("cpu", architecture, facts, DAY, lines or (CheckResult("a product", "right"),), {})
    return keep(result, folder / f"{result.key}.json")
