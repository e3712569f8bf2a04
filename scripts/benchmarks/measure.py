"""Shared code of the benchmarks: the model and one step, interleaved timing, and the result file.

Paired and interleaved: each round runs every contestant once, in an order that rotates, and a figure is the median over
rounds of the ratio within a round. Noise is the same ratio of a contestant to itself.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.policy import Precision
from diffusers import CogVideoXTransformer3DModel

Step = Callable[[], Any]
Result = TypeVar("Result")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
CLOCK = os.environ.get("BENCHMARK_CLOCK", "wall")  # "processor": for a shared CPU, with one thread
RESULTS = Path(__file__).parent / "results"


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a script that writes a result."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def arguments(description: str | None, *, rounds: int, rounds_help: str) -> argparse.ArgumentParser:
    parser = new_parser(description)
    parser.add_argument("--rounds", type=int, default=rounds, help=rounds_help)
    parser.add_argument("--blocks", type=int, default=3, help="number of blocks; CogVideoX-2B has 30")
    parser.add_argument("--heads", type=int, default=30, help="number of heads of 64 channels; CogVideoX-2B has 30")
    return parser


def device_and_dtype() -> tuple[torch.device, str]:
    """Return fp16 for a GPU, bf16 for a CPU, where fp16 times say nothing about a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, "fp16" if device.type == "cuda" else "bf16"


def build(
    blocks: int, heads: int, device: torch.device, dtype: str, height: int = 32, width: int = 48
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A denoiser of the 2B model's kind, and one step's arguments: both halves of guidance, 9 frames; height, width: of
    latents, those of 256×384 pixels."""
    torch.manual_seed(0)
    denoiser = CogVideoXTransformer3DModel(
        num_layers=blocks, num_attention_heads=heads, sample_width=width, sample_height=height, sample_frames=9
    )
    denoiser.eval().requires_grad_(False)
    torch.nn.Module.to(denoiser, device, DTYPES[dtype])
    hidden_states = torch.randn(2, 3, 16, height, width, device=device, dtype=DTYPES[dtype])
    prompt = torch.randn(2, 226, 4096, device=device, dtype=DTYPES[dtype])
    timestep = torch.tensor([500, 500], device=device)
    call = {"hidden_states": hidden_states, "encoder_hidden_states": prompt, "timestep": timestep}
    return denoiser, call | {"return_dict": False}


def in_float(call: dict[str, Any]) -> dict[str, Any]:
    """As the sampler hands it over: the guard casts."""
    floating = {k: v.float() for k, v in call.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return call | floating


def opened(folder: Path, precision: str, **options: Any) -> PipelineHandle:
    """The pipeline in a folder, neither compiled nor offloaded unless the options of `load` say so."""
    usual: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
    return load(folder, family_of(folder), precision=Precision(precision), **usual | options)


def interleave(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return seconds of each step in each round; one warm-up round is discarded."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_number in range(-1, rounds):
        turn = (round_number + 1) % len(names)
        for name in names[turn:] + names[:turn]:
            with held(steps[name]):
                taken = seconds_of(steps[name], device)
            if round_number >= 0:
                seconds[name].append(taken)
    return seconds


def held(step: Step) -> AbstractContextManager[None]:
    """Return the context that a run enters around all of its steps, if the step has one."""
    return getattr(step, "held", nullcontext)()


def seconds_of(step: Step, device: torch.device) -> float:
    synchronize(device)
    started = CLOCKS[CLOCK]()
    step()
    synchronize(device)
    return CLOCKS[CLOCK]() - started


def peak_bytes(step: Step, device: torch.device) -> int:
    """Return the step's peak of allocated bytes, minus what was allocated before.

    On a GPU from its allocator; on a CPU from the profiler's records.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    profiler: Any = profile.profiler
    records = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        held += record.nbytes()
        peak = max(peak, held)
    return peak


def attempt(run: Callable[[], Result]) -> Result | str:
    """Return the result, or one line about the failure: a contestant that fails must not end the others' run."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - out of memory, a backend that is not there, a compiler that fails
        lines = str(error).strip().splitlines()
        failure = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # after the exception released its memory
    return failure


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of what it differs by, in parts of the exact one's norm."""
    return float((found.float() - exact).norm() / exact.norm())


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    return round(statistics.median(_ratios(seconds, ours, theirs)), 4)


def quartiles(seconds: dict[str, list[float]], ours: str, theirs: str) -> list[float]:
    """Return the first and third quartile of the ratios."""
    low, _, high = statistics.quantiles(_ratios(seconds, ours, theirs), n=4)
    return [round(low, 4), round(high, 4)]


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}


def head(benchmark: str, place: torch.device | str, **more: Any) -> dict[str, Any]:
    """What every result begins with. place: what was measured on, or in words, where nothing was."""
    return {
        "benchmark": benchmark,
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": place if isinstance(place, str) else machine(place),
        "torch": torch.__version__,
        **more,
    }


def setting(
    benchmark: str, denoiser: torch.nn.Module, call: dict[str, Any], dtype: str, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Return the head of a result: the model, the machine and the settings."""
    parameters = sum(p.numel() for p in denoiser.parameters())
    _, frames, _, height, width = call["hidden_states"].shape
    tokens = frames * height * width // 4 + 226
    return head(benchmark, device, dtype=dtype, parameters=parameters, tokens=tokens, rounds=rounds)


def write(result: dict[str, Any], folder: Path, device: torch.device) -> None:
    """Write the result to a file in `folder`, and its figures to standard output."""
    file = write_json(result, folder, device.type)
    millions = result["parameters"] / 1e6
    print(f"{millions:.0f} M parameters, {result['dtype']}, {result['machine']}, {result['rounds']} rounds")
    for name, value in (result["median_seconds"] | result["ratios"]).items():
        print(f"{name:50} {value:8.4f}")
    print(f"written to {file}")


def write_json(result: dict[str, Any], folder: Path, device: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result['benchmark']}-{device}-{result['date']}.json"
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return file


def _ratios(seconds: dict[str, list[float]], ours: str, theirs: str) -> list[float]:
    return [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
