"""Measure the errors of int8, fp8, bf16 and fp16 against fp32, in single calls of small networks of the families and,
with --folder, in whole runs of a model.

    python scripts/benchmarks/quantised.py [--calls 3] [--folder DIR] [--out scripts/benchmarks/results]

int8 is torchao's own, with its CPU kernel. fp8 is torchao's own tensor and quantiser, with PyTorch's CPU kernel for its
scaled product (fp8_on_cpu.py), which adds in another order than a card. Both run on bf16, like the precisions `fp8` and
`int8`, and on float32, which shows the error of quantising by itself. `fp16` has overflow protection if the family has
it. Weights are random. Nothing is timed: times on a CPU say nothing about a card.

Errors are norms of differences from the same network in fp32, divided by the norm, with weights loaded in each dtype.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import denoisers
import diffusers
import torch
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW4
from comfyui_onediff_guard.pipelines.families.spec import FamilySpec
from comfyui_onediff_guard.pipelines.families.wan import WAN
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision import quantised
from comfyui_onediff_guard.precision.after_failure import build_half_precision_forward
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.overrides import NOTHING
from comfyui_onediff_guard.precision.policy import Precision
from comfyui_onediff_guard.precision.quantised import QuantisedLinears
from denoisers import Size
from fp8_on_cpu import fp8_weight
from measure import head, new_parser, opened, relative_error, write_json

CPU = torch.device("cpu")
KINDS = ("int8", "fp8")
_VIDEO = Size(
    96, 64, 9, {"num_layers": 6, "num_attention_heads": 8, "sample_width": 12, "sample_height": 8, "sample_frames": 9}
)
_COGVIEW = {"num_layers": 6, "num_attention_heads": 16}
_WAN = {"num_layers": 6, "num_attention_heads": 4, "ffn_dim": 2048}
_UNET = {"block_out_channels": (64, 128, 512, 512), "num_attention_heads": (1, 2, 8, 8), "cross_attention_dim": 512}
Subject = tuple[str, FamilySpec, Callable[[torch.dtype], torch.nn.Module], Callable[[Any, int], dict[str, Any]]]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--calls", type=int, default=3, help="number of calls of each network, with different inputs")
    parser.add_argument("--folder", type=Path, help="folder of a CogVideoX pipeline, whose runs are compared too")
    args = parser.parse_args()
    own = quantised.quantised_weight
    by_kind = {"fp8": fp8_weight, "int8": lambda layer: own(layer, "int8")}
    quantised.quantised_weight = lambda layer, kind: by_kind[kind](layer)
    import torchao

    with torch.no_grad():
        result = head("quantised", CPU, torchao=torchao.__version__) | {
            "fp8": "torchao's quantiser, PyTorch's CPU kernel",
            "weights": "random",
            "networks": {subject[0]: errors(subject, args.calls) for subject in subjects()},
        }
        if args.folder:
            result["runs"] = runs(args.folder)
    tell(result)
    print(f"written to {write_json(result, args.out, 'cpu')}")


def subjects() -> list[Subject]:
    """Return networks of the families' classes, as wide as quantised layers must be at least."""
    return [
        _published("cogvideox-2b", _VIDEO),
        _published("cogvideox-5b", _VIDEO),
        _published("cogview3-plus", Size(128, 128, config=_COGVIEW)),
        _other("cogview4", "CogView4Transformer2DModel", COGVIEW4, _COGVIEW, _small_picture),
        _other("wan", "WanTransformer3DModel", WAN, _WAN, _small_video),
        _published("svd-xt", Size(128, 128, 4, _UNET)),
    ]


def _published(name: str, size: Size) -> Subject:
    model = denoisers.MODELS[name]

    def made(dtype: torch.dtype) -> torch.nn.Module:
        return denoisers.build(model, size, CPU, dtype)

    def call(config: Any, seed: int) -> dict[str, Any]:
        return model.arguments(config, size, _floats(seed)) | {"return_dict": False}

    return name, model.family, made, call


def _other(name: str, kind: str, family: FamilySpec, config: dict[str, Any], call: Callable[..., Any]) -> Subject:
    def made(dtype: torch.dtype) -> torch.nn.Module:
        return denoisers.random_weights(lambda: getattr(diffusers, kind)(**config), CPU, dtype)

    return name, family, made, lambda config, seed: call(config, _floats(seed)) | {"return_dict": False}


def _small_picture(config: Any, floats: denoisers.Floats) -> dict[str, Any]:
    return denoisers.cogview(config, Size(128, 128), floats)


def _small_video(config: Any, floats: denoisers.Floats) -> dict[str, Any]:
    return {
        "hidden_states": floats(2, config.in_channels, 3, 12, 16),
        "encoder_hidden_states": floats(2, 64, config.text_dim),
        "timestep": torch.tensor([500, 500]),
    }


def _floats(seed: int) -> denoisers.Floats:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def errors(subject: Subject, calls: int) -> dict[str, Any]:
    """Return each precision's error of one call: the median over calls, and the largest."""
    name, family, make, arguments = subject
    single = make(torch.float32)
    running = contestants(single, family)
    found: dict[str, list[float]] = {}
    for seed in range(calls):
        given = arguments(single.config, seed)
        right = single(**given)[0]
        for kind, call in running.items():
            found.setdefault(kind, []).append(relative_error(call(given), right))
    half = copy.deepcopy(single).to(torch.bfloat16)
    layers = QuantisedLinears(half, _blocks(half, family), "int8")
    inside = sum(half.get_parameter(f"{each}.weight").numel() for each in layers.names)
    rows = {kind: {"median": statistics.median(each), "largest": max(each)} for kind, each in found.items()}
    print(f"{name}: done", flush=True)
    return {
        "parameters": sum(each.numel() for each in single.parameters()),
        "quantised_layers": len(layers.names),
        "quantised_parameters": inside,
        "errors": rows,
    }


def contestants(single: torch.nn.Module, family: FamilySpec) -> dict[str, Callable[[dict[str, Any]], torch.Tensor]]:
    """Return the functions that compute the call, by name."""

    def attempt(dtype: str, kind: str = "") -> Callable[[dict[str, Any]], torch.Tensor]:
        module = denoisers_in(single, DTYPES[dtype])
        blocks = _blocks(module, family)
        layers = QuantisedLinears(module, blocks, kind) if kind else None
        if layers:
            layers.fill()
        scaled = dtype == "fp16" and family.variants[0].protected
        made = build_half_precision_forward(module, NOTHING, dtype, all_layers_scaled=scaled, quantised=layers)
        return lambda given: made.run(**cast(given, family, DTYPES[dtype]))[0]

    def on_float32(kind: str) -> Callable[[dict[str, Any]], torch.Tensor]:
        half = denoisers_in(single, torch.bfloat16)
        names = QuantisedLinears(half, _blocks(half, family), kind).names
        module = copy.deepcopy(single)
        for name in names:
            layer: Any = module.get_submodule(name)
            layer.weight = torch.nn.Parameter(quantised.quantised_weight(layer, kind), requires_grad=False)
        return lambda given: module(**given)[0]

    return {
        "fp16": attempt("fp16"),
        "bf16": attempt("bf16"),
        **{f"{kind} on bf16": attempt("bf16", kind) for kind in KINDS},
        **{f"{kind} on float32": on_float32(kind) for kind in KINDS},
    }


def denoisers_in(single: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return a copy in a dtype. It avoids diffusers' own `to`, which warns."""
    made = copy.deepcopy(single)
    return torch.nn.Module.to(made, dtype)


def _blocks(module: torch.nn.Module, family: FamilySpec) -> tuple[str, ...]:
    return block_names(module, family.blocks)


def cast(given: dict[str, Any], family: FamilySpec, dtype: torch.dtype) -> dict[str, Any]:
    names = {*family.denoiser_inputs}
    return {
        name: value.to(dtype) if name in names and isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


def runs(folder: Path, steps: int = 20, seeds: int = 3) -> dict[str, Any]:
    """Return the latents' errors of whole runs of a model, in each precision."""
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample

    quantised.LEAST = 64  # for such a small model
    handle = opened(folder, "fp32", placement=PlainPlacement(CPU))
    config = handle.store.model.denoiser_config
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        shape = 1, config["max_text_seq_length"], config["text_embed_dim"]
        positive, negative = torch.randn(shape, generator=generator), torch.zeros(shape)
        latents: dict[str, torch.Tensor] = {}
        for precision in ("fp32", "fp16", "bf16", "int8"):
            settings = SampleSettings(64, 64, steps, seed, 13, 3.0, scheduler="DDIM")
            latents[precision], _ = sample(
                replace(handle, precision=Precision(precision)), positive, negative, settings
            )
        for precision, made in latents.items():
            found.setdefault(precision, []).append(relative_error(made, latents["fp32"]))
    return {"steps": steps, "seeds": seeds, "model": folder.name, "errors": found}


def tell(result: dict[str, Any]) -> None:
    for name, network in result["networks"].items():
        share = network["quantised_parameters"] / network["parameters"]
        print(f"{name}: {network['parameters'] / 1e6:.1f} M parameters, {share:.0%} of them quantised")
        for kind, row in network["errors"].items():
            print(f"    {kind:20} {row['median']:.5f}, at most {row['largest']:.5f}")
    for kind, each in result.get("runs", {}).get("errors", {}).items():
        print(f"runs, {kind:10} {statistics.median(each):.5f}, at most {max(each):.5f}")


if __name__ == "__main__":
    main()
