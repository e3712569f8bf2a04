"""Where a step's time goes: torch.profiler's kernels, by self time, and their kind of work."""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any

import torch
from measure import Step, synchronize

WARM_UP = 2
SHOWN = 30
NORMS = "norms, elementwise"
KINDS = {  # kind → parts of kernel names; the first match counts
    NORMS: ("triton_poi", "triton_red", "triton_per", "cpp_fused"),  # inductor names fused kernels after their parts
    "attention": ("flash", "fmha", "attention", "sdpa", "softmax"),
    "matrix products, convolutions": ("gemm", "mm", "conv", "cutlass", "cublas", "nvjet", "linear", "xmma", "sm90"),
    "norms and elementwise, not fused": (
        *("norm", "elementwise", "vectorized", "reduce", "gelu", "silu", "mul", "add", "cat"),
        *("copy", "_to_", "sub", "div"),
    ),
}


def kind(kernel: str) -> str:
    name = kernel.lower()
    return next((each for each, parts in KINDS.items() if any(part in name for part in parts)), "other")


def profile(steps: dict[str, Step], device: torch.device) -> str:
    """Return text: for each contestant the shares of one step by kind of work, and its longest kernels."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    named = {"cpp.enable_kernel_profile": device.type == "cpu"}  # else fused kernels have no names of their own
    with inductor.patch(named):
        return "\n".join(_one(name, step, device) for name, step in steps.items())


def _one(name: str, step: Step, device: torch.device) -> str:
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        synchronize(device)
    return f"## {name}\n\n{table(_microseconds(recorded, device))}\n"


def _microseconds(recorded: Any, device: torch.device) -> dict[str, tuple[float, int]]:
    """Return kernel → its self time in microseconds, and its number of calls."""
    made = {}
    for event in recorded.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if device.type == "cuda" and on_device:
            made[event.key] = (event.self_device_time_total, event.count)
        elif device.type == "cpu":
            made[event.key] = (event.self_cpu_time_total, event.count)
    return made


def table(kernels: dict[str, tuple[float, int]]) -> str:
    total = sum(spent for spent, _ in kernels.values()) or 1.0
    kinds: dict[str, float] = defaultdict(float)
    for name, (spent, _) in kernels.items():
        kinds[kind(name)] += spent
    lines = [f"{total / 1e6:.4f} s in kernels"]
    lines += [f"{spent / total:7.1%}  {each}" for each, spent in sorted(kinds.items(), key=lambda item: -item[1])]
    lines += ["", "   share        µs   calls  kernel"]
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:SHOWN]
    lines += [f"{spent / total:8.1%} {spent:9.0f} {count:7}  {name[:120]}" for name, (spent, count) in longest]
    return "\n".join(lines)
