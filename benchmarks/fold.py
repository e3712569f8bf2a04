"""What the fold costs a denoiser step: a folded one beside an unfolded one, eager and compiled, and how many graphs
the compiler makes of each.

    python benchmarks/fold.py [--rounds 40] [--blocks 3] [--out benchmarks/results]

A denoiser of CogVideoX-2B's width, bf16 on a CPU and fp16 on a GPU, compiled block by block as the sampler does it.
Where noise hides what the fold costs, its multiplications alone show it, on the tensors that they get in a step.
How it is timed, and what noise is: benchmarks/measure.py.
"""

from __future__ import annotations

from typing import Any

import torch
from comfyui_onediff_guard.pipelines.compile import choose_backend, compiled
from comfyui_onediff_guard.pipelines.families import COGVIDEOX
from comfyui_onediff_guard.precision.folding import fold
from comfyui_onediff_guard.precision.streams import Stream
from measure import arguments, build, device_and_dtype, interleave, medians, quartiles, ratio, setting, write

BITS = 6


def main() -> None:
    args = arguments(__doc__, rounds=40, rounds_help="of all contestants").parse_args()
    device, dtype = device_and_dtype()
    denoiser, call = build(args.blocks, args.heads, device, dtype)
    assert COGVIDEOX.stream
    folded = fold(denoiser, COGVIDEOX.stream, BITS)
    backend = choose_backend("inductor", device)
    with torch.no_grad():
        graphs = {
            name: count_graphs(compiled(module, COGVIDEOX.blocks, backend), call)
            for name, module in {"unfolded": denoiser, "folded": folded}.items()
        }
        torch.compiler.reset()
        compiled_denoiser = compiled(denoiser, COGVIDEOX.blocks, backend)
        compiled_folded = compiled(folded, COGVIDEOX.blocks, backend)
        scaled = writer_inputs(denoiser, COGVIDEOX.stream, call)
        seconds = interleave(
            {
                "unfolded, eager": lambda: denoiser(**call),
                "folded, eager": lambda: folded(**call),
                "unfolded again, eager": lambda: denoiser(**call),
                "multiplications alone, eager": lambda: [x * 2.0**-BITS for x in scaled],
                "unfolded, compiled": lambda: compiled_denoiser(**call),
                "folded, compiled": lambda: compiled_folded(**call),
                "unfolded again, compiled": lambda: compiled_denoiser(**call),
            },
            args.rounds,
            device,
        )
    pairs = {
        f"{title}, {mode}": (f"{ours}, {mode}", f"unfolded, {mode}")
        for mode in ("eager", "compiled")
        for title, ours in {
            "folded / unfolded": "folded",
            "noise: unfolded again / unfolded": "unfolded again",
        }.items()
    } | {"multiplications alone / unfolded, eager": ("multiplications alone, eager", "unfolded, eager")}
    result = setting("fold", denoiser, call, dtype, device, args.rounds) | {
        "backend": backend.name,
        "bits": BITS,
        "median_seconds": medians(seconds),
        "ratios": {title: ratio(seconds, *pair) for title, pair in pairs.items()},
        "middle_half_of_ratios": {title: quartiles(seconds, *pair) for title, pair in pairs.items()},
        "compiler": graphs,
    }
    write(result, args.out, device)
    for name, counts in graphs.items():
        print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def writer_inputs(denoiser: torch.nn.Module, stream: Stream, call: dict[str, Any]) -> list[torch.Tensor]:
    """What one step hands to the layers that write to the stream."""
    seen: list[torch.Tensor] = []
    writers = [denoiser.get_submodule(name) for name in stream.writer_names(denoiser)]
    handles = [writer.register_forward_pre_hook(lambda _writer, given: seen.append(given[0])) for writer in writers]
    denoiser(**call)
    for handle in handles:
        handle.remove()
    return seen


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
