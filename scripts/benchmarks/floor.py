"""The least time of a step: its floating-point operations divided by the speed of the device's matrix products."""

from __future__ import annotations

import time
from typing import Any

import torch
from comfyui_onediff_guard.precision.dtypes import DTYPES
from denoisers import Model, Size, build, step
from measure import synchronize
from torch.utils.flop_counter import FlopCounterMode

TFLOPS = {"NVIDIA H200": 790.0}  # TFLOP/s of large bf16 matrix products on that card
SECONDS = 3.0
KINDS = {  # on "meta", where attention consists of matrix products
    "aten.mm": "linear",
    "aten.addmm": "linear",
    "aten.convolution": "convolution",
    "aten.bmm": "attention",
    "aten.baddbmm": "attention",
}
WIDTH = {"cuda": 8192, "cpu": 512}


def tflop(model: Model, size: Size) -> dict[str, float]:
    """Return TFLOP of one step with guidance, by kind of work. A multiplication and an addition count as two. No
    weights are needed."""
    device = torch.device("meta")
    module = build(model, size, device, torch.bfloat16)
    call = step(model, module.config, size, device, torch.bfloat16)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**call)
    made = dict.fromkeys(KINDS.values(), 0.0)
    for operation, flop in counter.get_flop_counts()["Global"].items():
        made[KINDS[str(operation)]] += flop / 1e12
    return made


def measured_tflops(device: torch.device, dtype: str) -> float:
    """Return TFLOP/s of large matrix products, the best within SECONDS."""
    width = WIDTH.get(device.type, 512)
    a, b = (torch.randn(width, width, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    repeats = 10 if device.type == "cuda" else 1
    torch.mm(a, b)
    synchronize(device)
    best, ends = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        started = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b)
        synchronize(device)
        best = min(best, (time.perf_counter() - started) / repeats)
    return 2 * width**3 / best / 1e12


def tflops(device: torch.device, dtype: str) -> dict[str, Any]:
    """Return the TFLOP/s for the floor, and the value that was measured now."""
    measured = round(measured_tflops(device, dtype), 6)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if name in TFLOPS:
        return {"used": TFLOPS[name], "measured": measured, "source": f"table, for {name} in bf16"}
    return {"used": measured, "measured": measured, "source": f"matrix products in {dtype}, measured at the start"}
