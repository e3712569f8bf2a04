"""Measure the cost of the guard: a healthy step without and with it, and an fp32 rerun compared with a converted fp32
copy of the model, in seconds and in peak bytes allocated.

    python scripts/benchmarks/guard.py [--rounds 40] [--blocks 3] [--out scripts/benchmarks/results]

The guard's casts and checks are also timed by themselves, since noise may hide their share of a step. The denoiser has
CogVideoX-2B's width, in bf16 on a CPU and fp16 on a GPU. In the failing step, a fault is injected into the output of
the half-precision call. The first failing step of a run has a watched rerun, which records peaks to find the layer that
failed; learning.py measures its benefit. measure.py explains the timing and noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import detect
from comfyui_onediff_guard.precision.guard import GuardPolicy, StageGuard
from comfyui_onediff_guard.precision.layer_peaks import leaf_peaks
from comfyui_onediff_guard.precision.memory import largest_layer
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.precision.shallow_copy import with_forward
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from measure import arguments, build, device_and_dtype, in_float, interleave, medians, peak_bytes, ratio, setting, write


def main() -> None:
    help_text = "of the healthy step; a quarter of them of the fp32 steps"
    args = arguments(__doc__, rounds=40, rounds_help=help_text).parse_args()
    device, dtype = device_and_dtype()
    denoiser, call = build(args.blocks, args.heads, device, dtype)
    shell, failing, idle = guards(denoiser, dtype, call)
    converted = copy.deepcopy(denoiser).float()
    with torch.no_grad():
        given = in_float(call)
        assert torch.equal(shell(**given)[0], denoiser(**call)[0]), "a healthy guarded step must be bit-equal"
        healthy = interleave(
            {
                "unguarded": lambda: denoiser(**call),
                "guarded": lambda: shell(**given),
                "guard alone": lambda: idle(**given),
                "unguarded again": lambda: denoiser(**call),
            },
            args.rounds,
            device,
        )
        rerun = interleave(
            {
                "fp32 copy": lambda: converted(**given),
                "fp32 rerun": lambda: run_in_fp32(denoiser, **call),
                "watched rerun": lambda: leaf_peaks(denoiser, lambda: run_in_fp32(denoiser, **call)),
                "failing step": lambda: failing(**given),
                "healthy step": lambda: shell(**given),
            },
            max(3, args.rounds // 4),
            device,
        )

        peaks = {
            name: peak_bytes(step, device)
            for name, step in {
                "fp32 copy, activations": lambda: converted(**given),
                "fp32 rerun, activations and weights": lambda: run_in_fp32(denoiser, **call),
                "fp32 rerun, watched": lambda: leaf_peaks(denoiser, lambda: run_in_fp32(denoiser, **call)),
            }.items()
        }
    extra = peaks["fp32 rerun, activations and weights"] - peaks["fp32 copy, activations"]
    weights = 4 * sum(p.numel() for p in denoiser.parameters())
    largest = largest_layer(denoiser)
    result = setting("guard", denoiser, call, dtype, device, args.rounds) | {
        "median_seconds": medians(healthy | rerun),
        "ratios": {
            "guarded / unguarded": ratio(healthy, "guarded", "unguarded"),
            "guard alone / unguarded": ratio(healthy, "guard alone", "unguarded"),
            "noise: unguarded again / unguarded": ratio(healthy, "unguarded again", "unguarded"),
            "fp32 rerun / fp32 copy": ratio(rerun, "fp32 rerun", "fp32 copy"),
            "watched rerun / fp32 copy": ratio(rerun, "watched rerun", "fp32 copy"),
            "failing step / healthy step": ratio(rerun, "failing step", "healthy step"),
            "rerun's extra peak / largest leaf in fp32": round(extra / largest, 4),
            "rerun's extra peak / all weights in fp32": round(extra / weights, 4),
        },
        "peak_bytes": peaks,
    }
    write(result, args.out, device)


def guards(denoiser: torch.nn.Module, dtype: str, call: dict[str, Any]) -> tuple[torch.nn.Module, ...]:
    """Return guards: of the denoiser; of one with a NaN in each half-precision output; of a precomputed output."""
    architecture = detect(next(denoiser.parameters()).device)
    plan = choose(architecture, VARIANTS["CogVideoX-2B"], Component.DENOISER, Precision(dtype))
    inputs = ("hidden_states", "encoder_hidden_states")

    def broken(**call: Any) -> Any:
        output = denoiser(**call)
        output[0].view(-1)[7] = float("nan")
        return output

    def guard(attempt: Callable[..., Any]) -> torch.nn.Module:
        report = RunReport("CogVideoX-2B", "", plan)
        stage = StageGuard(
            "denoiser", attempt, rerun=denoiser, dtype=dtype, policy=GuardPolicy(), report=report, inputs=inputs
        )
        return with_forward(denoiser, stage)

    with torch.no_grad():
        output = denoiser(**call)
    return guard(denoiser), guard(broken), guard(lambda **_: output)


if __name__ == "__main__":
    main()
