"""What scaled layers cost a denoiser step: one with an fp32 residual stream beside one as it is, eager and compiled,
and how many graphs the compiler makes of each.

    python scripts/benchmarks/scaled_layers.py [--rounds 40] [--blocks 3] [--out scripts/benchmarks/results]

A denoiser of CogVideoX-2B's width, bf16 on a CPU and fp16 on a GPU, compiled block by block as the sampler does it.
How it is timed, and what noise is: scripts/benchmarks/measure.py.
"""

from __future__ import annotations

from typing import Any

import torch
from comfyui_onediff_guard.pipelines.compile.backends import choose_backend, compiled
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.scaled_layers import with_fp32_residual_stream
from measure import arguments, build, device_and_dtype, interleave, medians, quartiles, ratio, setting, write


def main() -> None:
    args = arguments(__doc__, rounds=40, rounds_help="of all contestants").parse_args()
    device, dtype = device_and_dtype()
    denoiser, call = build(args.blocks, args.heads, device, dtype)
    assert COGVIDEOX.stream
    protected = with_fp32_residual_stream(denoiser, COGVIDEOX.stream.writer_names(denoiser), DTYPES[dtype])
    backend = choose_backend("inductor", device)
    with torch.no_grad():
        graphs = {
            name: count_graphs(compiled(module, COGVIDEOX.blocks, backend), call)
            for name, module in {"plain": denoiser, "protected": protected}.items()
        }
        torch.compiler.reset()
        compiled_denoiser = compiled(denoiser, COGVIDEOX.blocks, backend)
        compiled_protected = compiled(protected, COGVIDEOX.blocks, backend)
        seconds = interleave(
            {
                "plain, eager": lambda: denoiser(**call),
                "protected, eager": lambda: protected(**call),
                "plain again, eager": lambda: denoiser(**call),
                "plain, compiled": lambda: compiled_denoiser(**call),
                "protected, compiled": lambda: compiled_protected(**call),
                "plain again, compiled": lambda: compiled_denoiser(**call),
            },
            args.rounds,
            device,
        )
    pairs = {
        f"{title}, {mode}": (f"{ours}, {mode}", f"plain, {mode}")
        for mode in ("eager", "compiled")
        for title, ours in {"protected / plain": "protected", "noise: plain again / plain": "plain again"}.items()
    }
    result = setting("scaled_layers", denoiser, call, dtype, device, args.rounds) | {
        "backend": backend.name,
        "median_seconds": medians(seconds),
        "ratios": {title: ratio(seconds, *pair) for title, pair in pairs.items()},
        "middle_half_of_ratios": {title: quartiles(seconds, *pair) for title, pair in pairs.items()},
        "compiler": graphs,
    }
    write(result, args.out, device)
    for name, counts in graphs.items():
        print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def count_graphs(shell: torch.nn.Module, call: dict[str, Any]) -> dict[str, int]:
    """What dynamo made of three steps from nothing, and what it added after the first."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    shell(**call)
    first = counters["stats"]["unique_graphs"]
    shell(**call)
    shell(**call)
    return {
        "graphs": first,
        "graphs added by later steps": counters["stats"]["unique_graphs"] - first,
        "graph breaks": sum(counters["graph_break"].values()),
    }


if __name__ == "__main__":
    main()
