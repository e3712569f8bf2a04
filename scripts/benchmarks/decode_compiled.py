"""Compare a compiled decode with the same decode in eager mode: time, and difference of the pictures.

    BENCHMARK_CLOCK=processor python scripts/benchmarks/decode_compiled.py [--models svd ...] [--rounds 15] [--out DIR]

Models are small, of the real classes with random weights, in fp32, and run through Decode Latents' own function. The
times hold for this machine; the gain of a full-size decoder on a card is not measured. measure.py explains the timing.
The error is the norm of the difference from the eager decode, divided by the latter's norm.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import measure
import torch
from comfyui_onediff_guard.pipelines.run.decode import decode

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
WIDER = {"block_out_channels": (32, 64, 64, 64), "layers_per_block": 2, "norm_num_groups": 16}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    # builder of the tests, what differs of its VAE's config, latents, how they are decoded
    "svd": ("svd", {"block_out_channels": (32, 64, 64, 64), "layers_per_block": 2}, (6, 4, 16, 16), {"chunk": 2}),
    "cogview3, tiles": ("cogview3", WIDER, (1, 16, 26, 26), {"tiling": True}),
    "cogvideox": ("2b", WIDER, (1, 16, 9, 8, 12), {}),
    "wan": ("wan", {"base_dim": 16}, (1, 16, 6, 8, 12), {}),
}


def main() -> None:
    parser = measure.new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    result = measure.head("decode_compiled", device, clock=measure.CLOCK, diffusers=diffusers.__version__)
    result |= {"dtype": "fp32", "rounds": args.rounds, "models": {}}
    file = args.out / f"{result['benchmark']}-{device.type}-{result['date']}.json"
    if file.exists():  # same day: other models
        result["models"] = json.loads(file.read_text(encoding="utf-8"))["models"]
    for name in args.models:
        found = measured(*MODELS[name], rounds=args.rounds, device=device)
        result["models"][name] = found
        print(name, json.dumps(found, indent=2), flush=True)
        print(f"written to {measure.write_json(result, args.out, device.type)}", flush=True)


def measured(
    builder: str, differs: dict[str, Any], shape: tuple[int, ...], how: dict[str, Any], *, rounds: int, device: Any
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = built(builder, differs, Path(folder) / "model")
        handle = measure.opened(model, "fp32")
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        run = partial(decode, handle, latents, **how)
        eager, _ = run(backend="eager")
        started = time.perf_counter()
        compiled, report = run(backend="inductor")
        first = time.perf_counter() - started
        steps = {
            "compiled": lambda: run(backend="inductor"),
            "eager": lambda: run(backend="eager"),
            "eager again": lambda: run(backend="eager"),
        }
        times = measure.interleave(steps, rounds, device)
        _, later = run(backend="inductor")
    module: Any = handle.store.module("vae", "fp32")
    return {
        "latents": list(shape),
        "compiled": report.backend_reason,
        "graphs": report.graphs,
        "graphs later": later.graphs,
        "parameters": sum(p.numel() for p in module.decoder.parameters()),
        "first decode, wall seconds": round(first, 1),
        "error": measure.relative_error(compiled, eager),
        "largest difference of a pixel": float((compiled - eager).abs().max()),
        "median_seconds": measure.medians(times),
        "ratios": {
            "compiled / eager": measure.ratio(times, "compiled", "eager"),
            "noise: eager again / eager": measure.ratio(times, "eager again", "eager"),
        },
        "half of the rounds between": {
            "compiled / eager": measure.quartiles(times, "compiled", "eager"),
            "noise: eager again / eager": measure.quartiles(times, "eager again", "eager"),
        },
    }


def built(builder: str, differs: dict[str, Any], folder: Path) -> Path:
    """Build one of the tests' small pipelines, with a wider VAE."""
    builders = {**import_module("small_families").BUILDERS, "wan": import_module("small_wan").build_wan}
    builders[builder](folder)
    kind = json.loads((folder / "model_index.json").read_text())["vae"][1]
    config = json.loads((folder / "vae" / "config.json").read_text()) | differs
    torch.manual_seed(0)
    getattr(diffusers, kind).from_config(config).eval().save_pretrained(folder / "vae")
    return folder


if __name__ == "__main__":
    main()
