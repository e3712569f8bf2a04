"""How far products that accumulate in fp16 are off, what the probe makes of that, and how far whole runs are off then.

    python benchmarks/fp16_accumulation.py [--networks cogvideox-2b ...] [--seeds 3] [--steps 12] [--out DIR]

By a model of tensor cores on a CPU (fp16_sums_on_cpu.py, which says what it leaves out): no card's kernel has made one
of these figures, and no time is taken. `products`: one product of random matrices for each inner size that published
models have. `networks`: single calls of cut-down networks of the families with random weights, 512 to 640 wide.
`runs`: of small trained models (trained.py, which makes them where they are not there yet), through the samplers' own
function, with the probe. Errors are norms of differences, as shares of the norm: of a layer and of a step against sums
in fp32, of a run's latents against those in fp32.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import quantised
import torch
from comfyui_onediff_guard.precision import fp16_sums as layers_of
from comfyui_onediff_guard.precision.accumulation import Accumulation
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.fallback import build_half_precision_forward
from comfyui_onediff_guard.precision.fp16_sums import LinearSums
from comfyui_onediff_guard.precision.overrides import NOTHING, ModuleStructure
from comfyui_onediff_guard.precision.sums import BUDGET, LayerError, Sums, settled
from fp16_sums_on_cpu import CHUNK, a_card_with_fp16_sums
from measure import RESULTS, machine, write_json
from step_cache import Subject, drift

CHUNKS = (CHUNK, 8, 4)
INNER = {  # of published models' linear layers
    "CogVideoX-2B, attention": 1920,
    "CogVideoX-5B, attention": 3072,
    "CogVideoX-2B, feed-forward": 7680,
    "CogVideoX-5B, feed-forward": 12288,
    "Wan 14B, feed-forward": 13824,
}
CARD = ARCHITECTURES["sm89"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=[], help="of quantised.py; none: all")
    parser.add_argument("--seeds", type=int, default=3, help="of the runs")
    parser.add_argument("--steps", type=int, default=12, help="of a run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with torch.no_grad():
        result: dict[str, Any] = {
            "benchmark": "fp16_accumulation",
            "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
            "machine": machine(torch.device("cpu")),
            "torch": torch.__version__,
            "kernel": "a model of tensor cores on a CPU; no card's kernel was run",
            "speed": "not measured",
            "budget": BUDGET,
            "products": {name: of_product(size) for name, size in INNER.items()},
            "networks": {
                subject[0]: of_network(subject)
                for subject in quantised.subjects()
                if subject[0] in args.networks or not args.networks
            },
        }
    result["runs"] = {name: of_runs(name, args.seeds, args.steps) for name in ("cogvideox", "svd")}
    tell(result)
    print(f"written to {write_json(result, args.out, 'cpu')}")


def of_product(inner: int) -> dict[str, Any]:
    """The error of one product, rounded to fp16 once and as each size of chunks rounds it."""
    generator = torch.Generator().manual_seed(inner)
    x, weight = torch.randn(256, inner, generator=generator), torch.randn(64, inner, generator=generator) / inner**0.5
    right = x.half().double() @ weight.half().double().t()
    made: dict[str, Any] = {"inner": inner, "fp32": off(right.half().double(), right)}
    for chunk in CHUNKS:
        with a_card_with_fp16_sums(chunk):
            made[f"fp16, {chunk} at a time"] = off(layers_of.linear(x.half(), weight.half(), None).double(), right)
    return made


def of_network(subject: quantised.Subject) -> dict[str, Any]:
    """What the probe measures of a network, and what it lets accumulate in fp16."""
    name, family, make, arguments = subject
    single = make(torch.float32)
    given = quantised.cast(arguments(single.config, 0), family, DTYPES["fp16"])
    module = quantised.denoisers_in(single, torch.float16)
    anatomy = ModuleStructure.of(module, family.blocks, family.stream)
    seen: list[LayerError] = []
    layers = LinearSums(module)
    attempt = build_half_precision_forward(
        module, anatomy, NOTHING, "fp16", wide=family.stream is not None, sums=layers
    )
    with a_card_with_fp16_sums(), noting(seen):
        sums = layers.probed(lambda: attempt.eager(**given))
    print(f"{name}: {sums}", flush=True)
    return facts(sums, seen)


class noting:  # noqa: N801 - a context manager
    """Note what the probe measures of each layer."""

    def __init__(self, seen: list[LayerError]):
        self._seen = seen

    def __enter__(self) -> None:
        def noted(measured: Any, step_error: Any) -> Sums:
            self._seen[:] = measured
            return settled(measured, step_error)

        layers_of.settled = noted

    def __exit__(self, *_: object) -> None:
        layers_of.settled = settled


def facts(sums: Sums, seen: list[LayerError]) -> dict[str, Any]:
    errors = [layer.error for layer in seen if layer.name in (*sums.layers, *sums.islands)]
    return {
        "layers": len(sums.layers),
        "islands": len(sums.islands),
        "median": statistics.median(errors),
        "largest": sums.largest,
        "farthest": sums.farthest,
        "step": sums.step,
    }


def of_runs(name: str, seeds: int, steps: int) -> dict[str, Any]:
    """How far latents are off in fp16, and in fp16 with sums in fp16; what the probe found."""
    full, half = Subject(name, "fp32"), Subject(name, "fp16")
    plain = replace(half.handle, architecture=CARD)
    asked = replace(plain, accumulation=Accumulation.FP16)
    found: dict[str, list[float]] = {"fp16": [], "fp16, sums in fp16": [], "between both": []}
    reruns = 0
    for seed in range(seeds):
        right, _ = full.sampled(full.handle, seed, steps=steps)
        made, _ = half.sampled(plain, seed, steps=steps)
        with a_card_with_fp16_sums():
            summed, report = half.sampled(asked, seed, steps=steps)
        reruns += report.reruns
        found["fp16"].append(drift(made, right))
        found["fp16, sums in fp16"].append(drift(summed, right))
        found["between both"].append(drift(summed, made))
        print(f"{name}, seed {seed}: {', '.join(f'{kind} {each[-1]:.5f}' for kind, each in found.items())}", flush=True)
    sums = asked.store.learned[asked.memory_key(asked.family.denoiser, "fp16")].sums
    assert sums is not None
    probed = {"layers": len(sums.layers), "islands": len(sums.islands), "largest": sums.largest, "step": sums.step}
    return {"steps": steps, "seeds": seeds, "probe": probed, "reruns": reruns, "errors": found}


def off(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made - right).norm() / right.norm())


def tell(result: dict[str, Any]) -> None:
    for name, row in result["products"].items():
        print(f"{name:28} {row['inner']:6} " + ", ".join(f"{kind} {row[kind]:.5f}" for kind in row if kind != "inner"))
    for name, row in result["networks"].items():
        print(
            f"{name:14} {row['layers']} of {row['layers'] + row['islands']} layers, median {row['median']:.5f}, "
            f"largest {row['largest']:.5f}, step {row['step']:.5f}"
        )
    for name, runs in result["runs"].items():
        for kind, each in runs["errors"].items():
            print(f"{name:14} {kind:20} {statistics.median(each):.5f}, at most {max(each):.5f}")


if __name__ == "__main__":
    main()
