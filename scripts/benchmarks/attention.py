"""PyTorch's attention kernels side by side, on the inputs of a model's step at its size."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from budget import Budget
from comfyui_onediff_guard.precision.attention import KERNELS, sdpa
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.upcast import TraceableMode
from denoisers import build, step
from measure import attempt, interleave, seconds_of
from subject import Subject
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CHOICE = "torch's own choice"
MOST = 4  # a model's most expensive shapes
Shape = tuple[int, int, int, int, int]  # batch, heads, queries, keys, channels per head


def shapes(subject: Subject) -> list[tuple[Shape, int]]:
    """Return (shape, calls per step), the most operations first."""
    device = torch.device("meta")
    module: Any = build(subject.model, subject.size, device, torch.bfloat16)
    call = step(subject.model, module.config, subject.size, device, torch.bfloat16)
    counted: Counter[Shape] = Counter()

    class Counting(TraceableMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is sdpa:
                query, key = [*args, *(kwargs or {}).values()][:2]
                batch, heads, queries, channels = query.shape
                counted[batch, heads, queries, key.shape[-2], channels] += 1
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Counting():
        module(**call)
    return sorted(counted.items(), key=lambda each: -each[1] * _operations(each[0]))


def _operations(shape: Shape) -> int:
    batch, heads, queries, keys, channels = shape
    return 4 * batch * heads * queries * keys * channels


def attention(subject: Subject, most: int, budget: Budget) -> list[dict[str, Any]]:
    """Return one entry per shape and half-precision dtype: seconds and error of each kernel, or its failure.

    most: rounds.
    """
    wanted = [(*found, dtype) for found in shapes(subject)[:MOST] for dtype in ("bf16", "fp16")]
    return [
        compare(*each, subject.device, lambda seconds, left=left: budget.rounds(seconds, most, share=1 / left))
        for left, each in zip(range(len(wanted), 0, -1), wanted, strict=True)
    ]


def compare(
    shape: Shape, calls: int, dtype: str, device: torch.device, rounds_of: Callable[[list[float]], int]
) -> dict[str, Any]:
    """Time the kernels. rounds_of: returns the number of rounds, given each kernel's seconds."""
    batch, heads, queries, keys, channels = shape
    query, key, value = (
        torch.randn(batch, tokens, heads, channels, device=device, dtype=DTYPES[dtype]).transpose(1, 2)
        for tokens in (queries, keys, keys)
    )

    def kernel(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value)

    contestants = {CHOICE: lambda: F.scaled_dot_product_attention(query, key, value)}
    contestants |= {name: lambda backend=backend: kernel(backend) for name, backend in KERNELS.items() if backend}
    expected = _exact(query[:1, :1], key[:1, :1], value[:1, :1])
    rows: dict[str, dict[str, Any]] = {}
    for name, run in list(contestants.items()):
        error = attempt(lambda run=run: (run()[:1, :1].float() - expected).abs().max().item())
        rows[name] = {"error": error} if isinstance(error, str) else {"max_error": round(error, 6)}
        if isinstance(error, str):
            del contestants[name]
    rounds = rounds_of([seconds_of(run, device) for run in contestants.values()])
    for name, seconds in interleave(contestants, rounds, device).items():
        middle = statistics.median(seconds)
        rows[name] |= {"seconds": round(middle, 6), "tflops": round(_operations(shape) / middle / 1e12, 3)}
    return {"shape": shape, "calls": calls, "dtype": dtype, "rounds": rounds, "rows": rows}


def _exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the output of one head in fp32: all heads would not fit."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query.float(), key.float(), value.float())
