"""Measure the cost of a layer that fails at every step in each scope of the guard, against a healthy run and an fp32
run.

    python scripts/benchmarks/learning.py [--rounds 50] [--blocks 30] [--heads 8] [--out scripts/benchmarks/results]

A round is one step of each. In half precision, one inner layer of one block returns NaN at every step; other layers and
the fp32 rerun do not. The dtype is bf16 on a CPU and fp16 on a GPU, where every layer is scaled. In scope `learned` the
first step finds the overrides; it counts as warm-up, and its time is reported separately.
scripts/benchmarks/measure.py explains the timing and noise.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.after_failure import FallbackAdapter, build_half_precision_forward
from comfyui_onediff_guard.precision.arch import detect
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope, StageGuard
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport
from faulty import faulty
from measure import arguments, build, device_and_dtype, in_float, interleave, medians, quartiles, ratio, setting, write

BLOCKS = "transformer_blocks"
HEIGHT, WIDTH = 16, 24  # of latents


def main() -> None:
    parser = arguments(__doc__, rounds=50, rounds_help="steps of each run")
    parser.set_defaults(blocks=30, heads=8)
    args = parser.parse_args()
    device, dtype = device_and_dtype()
    denoiser, call = build(args.blocks, args.heads, device, dtype, HEIGHT, WIDTH)
    call = in_float(call)
    leaf = f"{BLOCKS}.{args.blocks // 2}.ff.net.0"
    healthy, again = (guarded(denoiser, denoiser, dtype, Scope.STEP) for _ in range(2))
    by_scope = {scope: guarded(denoiser, faulty(denoiser, leaf), dtype, scope) for scope in Scope}
    converted = copy.deepcopy(denoiser).float()
    with torch.no_grad():
        first = first_steps(by_scope, call)
        seconds = interleave(
            {
                "healthy": lambda: healthy(**call),
                "learned": lambda: by_scope[Scope.LEARNED](**call),
                "step": lambda: by_scope[Scope.STEP](**call),
                "run": lambda: by_scope[Scope.RUN](**call),
                "all fp32": lambda: converted(**call),
                "healthy again": lambda: again(**call),
            },
            args.rounds,
            device,
        )
    reruns = {scope: guard.report.reruns for scope, guard in by_scope.items()}
    assert reruns == {Scope.STEP: args.rounds + 2, Scope.LEARNED: 1, Scope.RUN: 1}, reruns
    assert healthy.report.reruns == 0
    learned = by_scope[Scope.LEARNED].learned
    others = ("learned", "step", "run", "all fp32", "healthy again")
    result = setting("learning", denoiser, call, dtype, device, args.rounds) | {
        "blocks": args.blocks,
        "failing": leaf,
        "all_layers_scaled": learned.all_layers_scaled if learned else False,
        "median_seconds": medians(seconds) | {"first step, learned": round(first, 4)},
        "ratios": {f"{name} / healthy": ratio(seconds, name, "healthy") for name in others},
        "quartiles": {f"{name} / healthy": quartiles(seconds, name, "healthy") for name in others},
    }
    write(result, args.out, device)


def guarded(original: torch.nn.Module, attempted: torch.nn.Module, dtype: str, scope: Scope) -> StageGuard:
    architecture = detect(next(original.parameters()).device)
    plan = choose(architecture, VARIANTS["CogVideoX-2B"], Component.DENOISER, Precision(dtype))
    learner = FallbackAdapter(
        original,
        dtype,
        lambda known: build_half_precision_forward(attempted, known, dtype),
        block_names(original, [BLOCKS]),
    )
    return StageGuard(
        "denoiser",
        learner,
        rerun=original,
        dtype=dtype,
        policy=GuardPolicy(scope=scope),
        report=RunReport("CogVideoX-2B", str(architecture), plan),
        inputs=("hidden_states", "encoder_hidden_states"),
    )


def first_steps(by_scope: dict[Scope, StageGuard], call: dict[str, Any]) -> float:
    """Return the seconds of scope LEARNED's first step, which learns. The other scopes run theirs before."""
    for scope in (Scope.STEP, Scope.RUN):
        by_scope[scope](**call)
    started = time.perf_counter()
    by_scope[Scope.LEARNED](**call)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
