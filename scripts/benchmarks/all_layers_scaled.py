"""Measure a step with every layer scaled against the same network in plain half precision and in fp32: time, error
against fp32, and the host's share of the time.

    python scripts/benchmarks/all_layers_scaled.py [--rounds 8] [--blocks 3] [--heads 8] [--out DIR]

Steps are timed on a small transformer like CogVideoX-2B's and a small UNet like SDXL's, in bf16 on a CPU and fp16 on a
GPU. bf16 needs no scaling: fp16 runs as in `scaled`, bf16 as in `unscaled`. The host's time is measured on networks
with all layers of the published ones, but so narrow that the device has little to do.
scripts/benchmarks/measure.py explains the timing and noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from comfyui_onediff_guard.precision.upcast import run_in, run_in_fp32
from measure import Step, arguments, build, device_and_dtype, head, interleave, medians, quartiles, ratio, write_json
from networks import NETWORKS
from scaled_layers import in_compiled_blocks
from torch.overrides import TorchFunctionMode

PLAIN, AGAIN, FP32, RERUN = "plain", "plain again", "fp32 copy", "fp32 rerun"
SCALED, LEARNED, UNSCALED = "scaled", "learned", "unscaled"
COMPILED, LEARNED_COMPILED, COUNTED = "compiled blocks", "learned, compiled blocks", "calls counted"
HOST = ("cogvideox-2b", "sdxl")
Subject = tuple[Any, dict[str, Any]]  # a network and one call's arguments


class Scaled(ScaledHalfMatmulMode):
    """Scaled in any half precision, as in fp16; or in none."""

    def __init__(self, dtype: torch.dtype, *, scales: bool = True):
        super().__init__(dtype)
        self._scales = scales


class Counting(TorchFunctionMode):
    """Counts a network's calls of PyTorch functions."""

    calls = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = arguments(__doc__, rounds=8, rounds_help="rounds of all contestants")
    parser.set_defaults(heads=8)
    parser.add_argument("--size", default="cut", choices=("cut", "deep"), help="size of the UNet, from networks.py")
    args = parser.parse_args()
    device, dtype = device_and_dtype()
    with torch.no_grad():
        subjects = {
            f"CogVideoX, {args.blocks} blocks, {args.heads * 64} wide": build(args.blocks, args.heads, device, dtype),
            "SDXL's kind": made("sdxl", args.size, device, dtype),
        }
        result = head("all_layers_scaled", device, dtype=dtype, rounds=args.rounds) | {
            "networks": {name: compared(subject, args.rounds, device, dtype) for name, subject in subjects.items()},
            "host": {name: host(name, args.rounds, device) for name in HOST},
        }
    tell(result)
    print(f"written to {write_json(result, args.out, device.type)}")


def made(name: str, size: str, device: torch.device, dtype: str) -> Subject:
    network = NETWORKS[name]
    module: Any = network.make(size, device, DTYPES[dtype])
    return module, network.step(module.config, size, device, DTYPES[dtype])


def compared(subject: Subject, rounds: int, device: torch.device, dtype: str) -> dict[str, Any]:
    module, call = subject
    single, fp32_call = copy.deepcopy(module).float(), in_dtype(call, torch.float32)
    contestants: dict[str, Step] = {
        PLAIN: lambda: module(**call)[0],
        SCALED: scaled(Scaled(DTYPES[dtype]), subject),
        UNSCALED: scaled(Scaled(DTYPES[dtype], scales=False), subject),
        AGAIN: lambda: module(**call)[0],
        FP32: lambda: single(**fp32_call)[0],
        RERUN: lambda: run_in_fp32(module, **call)[0],
    }
    exact = contestants[FP32]()
    errors = {f"{name}, {dtype}": error(step(), exact) for name, step in contestants.items()}
    if dtype != "fp16":
        errors |= errors_in_fp16(module, call, exact)
    seconds = interleave(contestants, rounds, device)
    pairs = {f"{name} / {PLAIN}": (name, PLAIN) for name in contestants if name != PLAIN}
    pairs |= {f"{name} / {FP32}": (name, FP32) for name in (SCALED, UNSCALED, RERUN)}
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "median_seconds": medians(seconds),
        "ratios": {title: ratio(seconds, *pair) for title, pair in pairs.items()},
        "middle_half_of_ratios": {title: quartiles(seconds, *pair) for title, pair in pairs.items()},
        "errors": errors,
    }


def errors_in_fp16(module: Any, call: dict[str, Any], exact: torch.Tensor) -> dict[str, float]:
    """Return errors of one step in fp16, on devices where fp16 is too slow to be timed."""
    half = copy.deepcopy(module).half(), in_dtype(call, torch.float16)
    plain = error(half[0](**half[1])[0], exact)
    return {f"{PLAIN}, fp16": plain, f"{SCALED}, fp16": error(scaled(Scaled(torch.float16), half)(), exact)}


def host(name: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time the host's work for networks of narrow layers, in fp16."""
    module, call = subject = made(name, "deep", device, "fp16")
    learned = LearnedProducts()
    blocks = tuple(part for part, _ in module.named_modules() if part.rpartition(".")[2] == "transformer_blocks")
    compiled, learned_compiled = in_compiled_blocks(module, blocks, device)
    with Counting() as counted:
        module(**call)

    def with_a_mode() -> None:
        with Counting():
            module(**call)

    contestants: dict[str, Step] = {
        PLAIN: lambda: module(**call),
        SCALED: scaled(Scaled(torch.float16), subject),
        LEARNED: lambda: learned.run(module, **call),
        COMPILED: lambda: compiled(**call),
        LEARNED_COMPILED: lambda: learned_compiled(**call),
        COUNTED: with_a_mode,
        RERUN: lambda: run_in_fp32(module, **call),
        AGAIN: lambda: module(**call),
    }
    learned.run(module, **call)
    learned_compiled(**call)
    seconds = interleave(contestants, 3 * rounds, device)
    pairs = {f"{title} / {PLAIN}": (title, PLAIN) for title in contestants if title != PLAIN}
    milliseconds = {title: round(1e3 * min(taken), 2) for title, taken in seconds.items()}
    added = {title: round(taken - milliseconds[PLAIN], 2) for title, taken in milliseconds.items() if title != PLAIN}
    return {
        "said": NETWORKS[name].said.split(",")[0],
        "function_calls": counted.calls,
        "ratios": {title: ratio(seconds, *pair) for title, pair in pairs.items()},
        "middle_half_of_ratios": {title: quartiles(seconds, *pair) for title, pair in pairs.items()},
        "least_ms": milliseconds,
        "median_ms": {title: round(1e3 * taken, 2) for title, taken in medians(seconds).items()},
        "added_ms": added,
        "added_microseconds_a_call": {title: round(1e3 * more / counted.calls, 2) for title, more in added.items()},
    }


def scaled(products: ScaledHalfMatmulMode, subject: Subject) -> Callable[[], torch.Tensor]:
    module, call = subject
    return lambda: run_in(products, module, (), call)[0]


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: in_dtype(part, dtype) for name, part in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference, as a share of fp32's norm."""
    return round(((found.float() - exact).norm() / exact.norm()).item(), 6)


def tell(result: dict[str, Any]) -> None:
    print(f"{result['dtype']}, {result['machine']}, {result['rounds']} rounds")
    for name, found in result["networks"].items():
        print(f"\n{name}, {found['parameters'] / 1e6:.0f} M parameters")
        for title, seconds in found["median_seconds"].items():
            print(f"{title + ', seconds':34}{seconds:9.4f}")
        for title, over in found["ratios"].items():
            low, high = found["middle_half_of_ratios"][title]
            print(f"{title:34}{over:9.3f}   half of the rounds {low:.3f} to {high:.3f}")
        for title, off in found["errors"].items():
            print(f"{'error, ' + title:34}" + (f"{off:9.5f}" if math.isfinite(off) else f"{'NaN':>9}"))
    for found in result["host"].values():
        print(f"\nthe host's work, {found['said']}'s layers, {found['function_calls']} function calls a step")
        for title, least in found["least_ms"].items():
            more = found["added_microseconds_a_call"].get(title)
            print(f"{title + ', ms':34}{least:9.2f}" + (f"{more:9.2f} µs a call more" if more is not None else ""))


if __name__ == "__main__":
    main()
