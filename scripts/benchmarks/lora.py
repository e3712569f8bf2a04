"""Measure the cost of changing a LoRA with compiled blocks: new graphs, and the time of the next step.

    python scripts/benchmarks/lora.py

The denoiser is a small one like CogVideoX-2B's. LoRAs have random weights, in files like those of diffusers' training
scripts. Each row is the first step after a change, in one process, in this order; its time includes reading the file.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.denoiser import guarded_denoiser
from comfyui_onediff_guard.precision.guard import GuardPolicy
from comfyui_onediff_guard.precision.policy import Component, Precision
from denoisers import MODELS
from measure import head, new_parser, write_json
from random_model import handle
from subject import Subject

LAYERS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")  # trained by diffusers' scripts
LATER = 5  # steps after the first


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--size", default="cut", help="size of cogvideox-2b, from denoisers.py")
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    device, model = torch.device("cuda" if torch.cuda.is_available() else "cpu"), MODELS["cogvideox-2b"]
    subject = Subject("cogvideox-2b", model, model.sizes[args.size], device, "bf16")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        rows = dict(changes(subject, args.backend, Path(folder)))
    result = head("lora", device, size=f"{args.size}: {subject.size}")
    result |= {"parameters": sum(parameter.numel() for parameter in subject.module.parameters()), "rows": rows}
    file = write_json(result, args.out, device.type)
    for name, row in rows.items():
        print(f"{name:44} {row['graphs']:3} graphs   first step {row['first']:8.2f} s   later {row['later']:8.3f} s")
    print(f"written to {file}")


def changes(subject: Subject, backend: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each change, with the seconds of the first step after it and of a later step."""
    one, other = (
        saved(subject, folder / f"{name}.safetensors", 16, seed) for seed, name in enumerate(("one", "other"))
    )
    wider = saved(subject, folder / "wider.safetensors", 32, 2)
    runs: dict[str, tuple[Lora, ...]] = {
        "no LoRA, nothing compiled yet": (),
        "a LoRA of rank 16": (Lora(one, 1.0),),
        "its strength changed": (Lora(one, 0.4),),
        "another file of rank 16": (Lora(other, 1.0),),
        "no LoRA again": (),
        "a LoRA of rank 32": (Lora(wider, 1.0),),
        "its strength changed, rank 32": (Lora(wider, 0.4),),
    }
    pipeline = handle(subject.components, Precision.BF16, backend, GuardPolicy())
    for name, loras in runs.items():
        yield name, timed(subject, replace(pipeline, loras=loras))


def timed(subject: Subject, pipeline: Any) -> dict[str, Any]:
    graphs, seconds = graphs_made(), list[float]()
    stage = pipeline.stage(Component.DENOISER)
    with pipeline.switched(stage.report):
        started = time.perf_counter()
        denoiser = guarded_denoiser(stage)
        for _ in range(1 + LATER):
            denoiser(**subject.given)
            seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
    later = round(statistics.median(seconds[1:]), 4)
    return {"graphs": graphs_made() - graphs, "first": round(seconds[0], 3), "later": later}


def graphs_made() -> int:
    return importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"]


def saved(subject: Subject, path: Path, rank: int, seed: int) -> Path:
    """Write a LoRA of random weights, for all attention of the denoiser, to a file."""
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, layer in subject.module.named_modules():
        if name.endswith(LAYERS):
            for part, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
                tensors[f"transformer.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.02
    save_file(tensors, path)
    return path


if __name__ == "__main__":
    main()
