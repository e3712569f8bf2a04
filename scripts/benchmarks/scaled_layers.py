"""Count the graphs, and the kernels in inductor's code, that overflow protection adds to compiled blocks.

    python scripts/benchmarks/scaled_layers.py [--blocks 3] [--heads 8] [--out scripts/benchmarks/results]

A denoiser like CogVideoX-2B's in fp16 on a CPU is compiled block by block, as in the sampler: plain, and with learned
scales, whose first step is not compiled. Both are counted with room in every layer, and with an overflowing
feed-forward in the middle block. A kernel is a node of inductor's scheduler after fusion, including matrix products and
attention; on a card Triton fuses differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from comfyui_onediff_guard.pipelines.compile.backends import choose_backend, compiled
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.precision.after_failure import build_half_precision_forward
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.overrides import NOTHING
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from measure import arguments, build, head, relative_error, write_json

CPU = torch.device("cpu")


def main() -> None:
    args = arguments(__doc__, rounds=1, rounds_help="not used").parse_args()
    denoiser, call = build(args.blocks, args.heads, CPU, "fp16")
    rows: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        plain, learned = in_compiled_blocks(denoiser, COGVIDEOX.blocks)
        rows["plain"] = counted(plain, denoiser, call)
        rows["learned scales, room in every layer"] = counted(learned, denoiser, call)
        feed_forward: Any = denoiser.get_submodule(f"transformer_blocks.{args.blocks // 2}.ff")
        feed_forward.net[0].proj.weight.mul_(2.0**10)
        feed_forward.net[2].weight.mul_(2.0**6)
        plain, learned = in_compiled_blocks(denoiser, COGVIDEOX.blocks)
        rows["plain, a hot block"] = counted(plain, denoiser, call)
        rows["learned scales, a hot block"] = counted(learned, denoiser, call)
    for name, row in rows.items():
        print(f"{name:40}" + ", ".join(f"{value:.4g} {what}" for what, value in row.items()))
    result = head("scaled_layers", "CPU, counted and not timed", blocks=args.blocks, rows=rows)
    print(f"written to {write_json(result, args.out, 'cpu')}")


def in_compiled_blocks(
    denoiser: torch.nn.Module, parts: tuple[str, ...], device: torch.device = CPU
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the denoiser with compiled blocks, plain and with learned scales. parts: its lists of blocks."""
    backend = choose_backend("inductor", device)

    def in_blocks(shell: torch.nn.Module, _plan: Any, inside: Any) -> torch.nn.Module:
        return compiled(shell, parts, backend, None, inside)

    options: dict[str, Any] = {"compiled": in_blocks, "blocks": block_names(denoiser, parts)}
    learned = build_half_precision_forward(denoiser, NOTHING, "fp16", all_layers_scaled=True, **options)
    return compiled(denoiser, parts, backend), learned.run


def counted(run: Callable[..., Any], denoiser: torch.nn.Module, call: dict[str, Any]) -> dict[str, float]:
    """Return dynamo's and inductor's counts for three steps without a cache, and the last step's error against fp32."""
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import NopKernelSchedulerNode

    kernels: list[int] = []
    generate = GraphLowering.codegen

    def counting(graph: Any) -> Any:
        made = generate(graph)
        kernels.append(sum(not isinstance(node, NopKernelSchedulerNode) for node in graph.scheduler.nodes))
        return made

    torch.compiler.reset()
    counters.clear()
    exact = run_in_fp32(denoiser, **call)[0]
    uncached = config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with uncached[0], uncached[1], mock.patch.object(GraphLowering, "codegen", counting):
        made = [run(**call)[0].float() for _ in range(3)][-1]
    graphs = counters["stats"]["unique_graphs"]
    return {
        "graphs": graphs,
        "graph breaks": sum(counters["graph_break"].values()),
        "kernels of a graph": sum(kernels) / graphs,
        "error": relative_error(made, exact),
    }


if __name__ == "__main__":
    main()
