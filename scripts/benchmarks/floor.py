"""The least time that a step can take: its floating-point operations over what the device's matrix products reach."""

from __future__ import annotations

import time
from typing import Any

import torch
from comfyui_onediff_guard.precision.dtypes import DTYPES
from denoisers import Model, Size, build, step
from measure import synchronize
from torch.utils.flop_counter import FlopCounterMode

TFLOPS = {"NVIDIA H200": 790.0}  # a second, reached in bf16 by large matrix products on that card
SECONDS = 3.0
KINDS = {  # on "meta", where attention is matrix products
    "aten.mm": "linear",
    "aten.addmm": "linear",
    "aten.convolution": "convolution",
    "aten.bmm": "attention",
    "aten.baddbmm": "attention",
}
WIDTH = {"cuda": 8192, "cpu": 512}


def tflop(model: Model, size: Size) -> dict[str, float]:
    """TFLOP of one step with guidance by the kind of work, a multiplication and an addition being two: counted without
    any weight."""
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
    """TFLOP/s of large matrix products, the best of some seconds of them."""
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
    """What the floor is reckoned with, and what was measured now."""
    measured = round(measured_tflops(device, dtype), 6)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if name in TFLOPS:
        return {"used": TFLOPS[name], "measured": measured, "source": f"table, for {name} in bf16"}
    return {"used": measured, "measured": measured, "source": f"matrix products in {dtype}, measured at the start"}
