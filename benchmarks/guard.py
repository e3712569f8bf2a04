"""What guard and fold cost: a healthy step without them and with each, and an fp32 rerun beside an already-converted
fp32 copy, in seconds and in peak bytes allocated.

    python benchmarks/guard.py [--rounds 40] [--blocks 3] [--out benchmarks/results]

Paired and interleaved: each round runs every contestant once, in an order that turns from round to round, and the
figure is the median over rounds of the ratio within a round. Noise is the same ratio of a contestant to itself; where
it hides what the guard costs, the guard alone shows it: its casts and checks around an output that is there already.
A denoiser of CogVideoX-2B's width, bf16 on a CPU and fp16 on a GPU; the failing step has a fault injected into the
half attempt's output.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.families import COGVIDEOX
from comfyui_onediff_guard.precision.arch import detect
from comfyui_onediff_guard.precision.folding import fold
from comfyui_onediff_guard.precision.guard import DTYPES, GuardPolicy, StageGuard, guarded
from comfyui_onediff_guard.precision.policy import VARIANTS, Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from diffusers import CogVideoXTransformer3DModel

Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=40, help="of the healthy step; a quarter of them of the fp32 steps"
    )
    parser.add_argument("--blocks", type=int, default=3, help="of CogVideoX-2B's 30")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = "fp16" if device.type == "cuda" else "bf16"
    denoiser, call = build(args.blocks, device, dtype)
    shell, failing, idle = guards(denoiser, dtype, call)
    converted = copy.deepcopy(denoiser).float()
    folded = fold(denoiser, COGVIDEOX.stream, 6)
    with torch.no_grad():
        given = in_float(call)  # as the sampler hands it over: the guard casts
        assert torch.equal(shell(**given)[0], denoiser(**call)[0]), "a healthy guarded step must be bit-equal"
        healthy = interleave(
            {
                "unguarded": lambda: denoiser(**call),
                "guarded": lambda: shell(**given),
                "guard alone": lambda: idle(**given),
                "folded": lambda: folded(**call),
                "unguarded again": lambda: denoiser(**call),
            },
            args.rounds,
            device,
        )
        rerun = interleave(
            {
                "fp32 copy": lambda: converted(**given),
                "fp32 rerun": lambda: run_in_fp32(denoiser, **call),
                "failing step": lambda: failing(**given),
                "healthy step": lambda: shell(**given),
            },
            max(3, args.rounds // 4),
            device,
        )

        peaks = {
            "fp32 copy, activations": peak_bytes(lambda: converted(**given)),
            "fp32 rerun, activations and weights": peak_bytes(lambda: run_in_fp32(denoiser, **call)),
        }
    parameters = sum(p.numel() for p in denoiser.parameters())
    extra = peaks["fp32 rerun, activations and weights"] - peaks["fp32 copy, activations"]
    largest = max(sum(p.numel() for p in leaf.parameters(recurse=False)) for leaf in denoiser.modules()) * 4
    result = {
        "benchmark": "guard",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "dtype": dtype,
        "parameters": parameters,
        "tokens": call["hidden_states"].shape[1] * 16 * 24 + 226,
        "rounds": args.rounds,
        "median_seconds": {name: round(statistics.median(values), 4) for name, values in (healthy | rerun).items()},
        "ratios": {
            "guarded / unguarded": ratio(healthy, "guarded", "unguarded"),
            "guard alone / unguarded": ratio(healthy, "guard alone", "unguarded"),
            "folded / unguarded": ratio(healthy, "folded", "unguarded"),
            "noise: unguarded again / unguarded": ratio(healthy, "unguarded again", "unguarded"),
            "fp32 rerun / fp32 copy": ratio(rerun, "fp32 rerun", "fp32 copy"),
            "failing step / healthy step": ratio(rerun, "failing step", "healthy step"),
            "rerun's extra peak / largest leaf in fp32": round(extra / largest, 4),
            "rerun's extra peak / all weights in fp32": round(extra / (4 * parameters), 4),
        },
        "peak_bytes": peaks,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"guard-{device.type}-{result['date']}.json"
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{parameters / 1e6:.0f} M parameters, {dtype}, {result['machine']}, {args.rounds} rounds")
    for name, value in (result["median_seconds"] | result["ratios"]).items():
        print(f"{name:45} {value:8.4f}")
    print(f"written to {file}")


def build(blocks: int, device: torch.device, dtype: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A denoiser of the 2B model's width, and one step's arguments: both halves of guidance, 256×384, 9 frames."""
    torch.manual_seed(0)
    denoiser = CogVideoXTransformer3DModel(num_layers=blocks, sample_width=48, sample_height=32, sample_frames=9)
    denoiser.eval().requires_grad_(False)
    torch.nn.Module.to(denoiser, device, DTYPES[dtype])
    hidden_states = torch.randn(2, 3, 16, 32, 48, device=device, dtype=DTYPES[dtype])
    prompt = torch.randn(2, 226, 4096, device=device, dtype=DTYPES[dtype])
    timestep = torch.tensor([500, 500], device=device)
    call = {"hidden_states": hidden_states, "encoder_hidden_states": prompt, "timestep": timestep}
    return denoiser, call | {"return_dict": False}


def guards(denoiser: torch.nn.Module, dtype: str, call: dict[str, Any]) -> tuple[torch.nn.Module, ...]:
    """(the guarded denoiser; with a NaN injected into each half attempt; around an output that is there already)."""
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
        return guarded(denoiser, stage)

    with torch.no_grad():
        output = denoiser(**call)
    return guard(denoiser), guard(broken), guard(lambda **_: output)


def in_float(call: dict[str, Any]) -> dict[str, Any]:
    floating = {k: v.float() for k, v in call.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return call | floating


def interleave(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each step in each round; one warm-up round is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_number in range(-1, rounds):
        turn = (round_number + 1) % len(names)
        for name in names[turn:] + names[:turn]:
            synchronize(device)
            started = time.perf_counter()
            steps[name]()
            synchronize(device)
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def peak_bytes(step: Step) -> int:
    """The most bytes that the step held at one time, beyond what was there before it, by the profiler's records."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    profiler: Any = profile.profiler
    records = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        held += record.nbytes()
        peak = max(peak, held)
    return peak


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    return round(statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)), 4)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
