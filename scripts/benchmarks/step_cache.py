"""Count the calls that a step cache skips, and measure the drift of results, on small trained models. Nothing is timed.

    python scripts/benchmarks/step_cache.py [cogvideox] [--seeds 200] [--first-seed 0] [--few N] [--out DIR]

Each seed is a run of the real pipeline, through the samplers' own function, with and without a cache. Drift is the norm
of the difference of their latents, divided by the norm without a cache. Hooks on the blocks count their calls, and
PyTorch counts operations (multiplications and additions of matrix products, convolutions and attention).
scripts/benchmarks/trained.py makes the models if they are missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.run import denoiser as denoising
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.policy import Component
from measure import head, new_parser, opened, relative_error, write_json
from moving_shapes import Scenes
from torch.utils.flop_counter import FlopCounterMode
from trained import FRAMES, SIDE, TEXT, colours_of, trained

TARGET = 0.02
STEPS = 50
OTHER_STEPS = 20, 100


@dataclass(frozen=True)
class Made:
    """One run."""

    latents: torch.Tensor
    report: Any
    calls: int  # calls of blocks, counted by hooks
    operations: int  # 0: not counted


class Subject:
    """A trained model, which can be run."""

    def __init__(self, name: str, precision: str = "fp32"):
        self._uncached: dict[Any, Made] = {}
        self.handle = opened(trained(name), precision)

    def run(self, seed: int, policy: CachePolicy | None = None, *, count: bool = False, **more: Any) -> Made:
        handle = replace(self.handle, step_cache=policy)
        with counted_calls(self.blocks) as calls, operations(count) as found:
            latents, report = self.sampled(handle, seed, **more)
        return Made(latents, report, calls[0], found())

    def uncached(self, seed: int, **more: Any) -> Made:
        """Return a run without a cache; each is made only once."""
        key = (seed, *more.items())
        if key not in self._uncached:
            self._uncached[key] = self.run(seed, **more)
        return self._uncached[key]

    @property
    def blocks(self) -> list[torch.nn.Module]:
        dtype = self.handle.stage(Component.DENOISER).plan.dtype
        module: Any = self.handle.store.module(self.handle.family.denoiser, dtype)
        return [*module.transformer_blocks]

    def sampled(
        self, handle: PipelineHandle, seed: int, *, batch: int = 1, denoiser: Any = None, **more: Any
    ) -> tuple[torch.Tensor, Any]:
        scenes = Scenes.drawn(batch, torch.Generator().manual_seed(10_000 + seed))
        prompt = scenes.prompts(TEXT)
        settings = SampleSettings(SIDE, SIDE, STEPS, seed, frames=FRAMES, guidance_scale=6.0)
        return sample(handle, prompt, torch.zeros_like(prompt), replace(settings, **more), denoiser=denoiser)


@contextmanager
def counted_calls(blocks: list[torch.nn.Module]) -> Iterator[list[int]]:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hooks = [block.register_forward_pre_hook(count) for block in blocks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def operations(count: bool) -> Iterator[Callable[[], int]]:
    if not count:
        yield lambda: 0
        return
    with FlopCounterMode(display=False) as counter:
        yield counter.get_total_flops


def psnr(subject: Subject, found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the pictures, in dB, against their full range of 1. Latents: [batch, channels, frames, height, width]."""
    factor = subject.handle.store.model.vae_config["scaling_factor"]  # back for the VAE
    found, wanted = (colours_of(each.movedim(1, 2) * factor) for each in (found, wanted))
    return -10 * math.log10(max(float((found - wanted).square().mean()), 1e-12))


def over_seeds(subject: Subject, policy: CachePolicy, seeds: range, **more: Any) -> dict[str, Any]:
    """Compare runs with a cache to runs without one, in the same precision."""
    drifts, pictures, skipped, uses = [], [], [], []
    for seed in seeds:
        plain, found = subject.uncached(seed, **more), subject.run(seed, policy, **more)
        drifts.append(relative_error(found.latents, plain.latents))
        pictures.append(psnr(subject, found.latents, plain.latents))
        skipped.append(1 - found.calls / plain.calls)
        uses.append(found.report.cache)
        print(f"seed {seed}: drift {drifts[-1]:.4%}, skipped {skipped[-1]:.1%}, {uses[-1]}", flush=True)
    over = [seed for seed, at in zip(seeds, drifts, strict=True) if at > policy.error]
    unsaid = [seed for seed, use in zip(seeds, uses, strict=True) if seed in over and not use.over_target]
    return {
        "seeds": [seeds.start, seeds.stop - 1],
        "error": policy.error,
        "steps_cached": spread([use.cached for use in uses]),
        "drift": spread(drifts),
        "estimated_drift": spread([use.drift for use in uses]),
        "drift_over_estimated": spread([at / use.drift for at, use in zip(drifts, uses, strict=True) if use.drift]),
        "psnr_dB": spread(pictures),
        "seeds_over_target": over,
        "seeds_said_to_be_over_target": [seed for seed, use in zip(seeds, uses, strict=True) if use.over_target],
        "seeds_over_target_unsaid": unsaid,
        "block_calls_skipped": spread(skipped),
    }


def operations_of(subject: Subject, policy: CachePolicy, seeds: range) -> dict[str, Any]:
    """Return the share of operations that a cache skips, encoders included."""
    plain = subject.run(seeds.start, count=True).operations
    ratios = [1 - subject.run(seed, policy, count=True).operations / plain for seed in seeds]
    return {"operations_of_a_run": plain, "operations_skipped": spread(ratios)}


def in_half(name: str, precision: str, policy: CachePolicy, seeds: range) -> dict[str, Any]:
    """Return the drift from fp32 without a cache: of half precision alone, and of half precision with a cache."""
    exact, half = Subject(name), Subject(name, precision)
    alone, cached = [], []
    for seed in seeds:
        wanted = exact.uncached(seed).latents
        alone.append(relative_error(half.run(seed).latents, wanted))
        cached.append(relative_error(half.run(seed, policy).latents, wanted))
    return {"alone": spread(alone), "with_a_cache": spread(cached)}


def nan_at_each_step(name: str, precision: str, policy: CachePolicy, seed: int = 0) -> dict[str, Any]:
    """Make one step's attempt NaN, each step in its own run. Compares with the same run without a cache; and both with
    fp32 without a NaN or cache, as two runs in half precision differ by rounding."""
    subject, exact, reruns = Subject(name, precision), Subject(name).run(seed).latents, 0
    drifts, alone, cached = [], [], []
    for step in range(STEPS):
        with broken_at(step):
            plain, found = subject.run(seed), subject.run(seed, policy)
        reruns += found.report.cells()[step] == "rerun"
        drifts.append(relative_error(found.latents, plain.latents))
        alone.append(relative_error(plain.latents, exact))
        cached.append(relative_error(found.latents, exact))
    return {
        "rerun": reruns,
        "drift": spread(drifts),
        "off_fp32_without_a_cache": spread(alone),
        "off_fp32_with_a_cache": spread(cached),
        "not_finite": sum(map(math.isnan, drifts)),
    }


@contextmanager
def broken_at(step: int) -> Iterator[None]:
    make = denoising.build_attempt

    def build(stage: Any, *given: Any) -> Any:
        made = make(stage, *given)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            output = made.run(*args, **kwargs)
            return (output[0] * torch.nan,) if len(stage.report.steps) == step else output

        return replace(made, run=attempt)

    denoising.build_attempt = build
    try:
        yield
    finally:
        denoising.build_attempt = make


def spread(values: list[float]) -> dict[str, float]:
    """Return least, mean and most; empty if there are no values, as estimates without cached steps."""
    if not values:
        return {}
    named = {"least": min(values), "mean": statistics.fmean(values), "most": max(values)}
    return {name: round(value, 5) for name, value in named.items()}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("models", nargs="*", default=["cogvideox"], metavar="MODEL", help="cogvideox")
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds for the target error")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--few", type=int, default=10, help="number of seeds for all other figures")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    few = range(args.first_seed, args.first_seed + args.few)
    result = head("step_cache", torch.device("cpu"), steps=STEPS)
    for name in args.models:
        result[name] = {}
        for figures in figures_of(name, seeds, few):
            result[name] |= figures
            print(name, figures, flush=True)
            print(write_json(result, args.out, "cpu"))


def figures_of(name: str, seeds: range, few: range) -> Iterator[dict[str, Any]]:
    """Yield a model's figures, one after the other."""
    subject, policy = Subject(name), CachePolicy(TARGET)
    denoiser = subject.handle.store.module(subject.handle.family.denoiser, "fp32")
    yield {"parameters": sum(p.numel() for p in denoiser.parameters())}
    if seeds:
        yield {"target": over_seeds(subject, policy, seeds)}
    if not few:
        return
    yield {"operations": operations_of(subject, policy, few[:3])}
    yield {"errors": [over_seeds(subject, CachePolicy(error), few) for error in (0.005, 0.01, 0.05)]}
    yield {"other_steps": {str(steps): over_seeds(subject, policy, few, steps=steps) for steps in OTHER_STEPS}}
    yield {"DPM": over_seeds(subject, policy, few, scheduler="DPM")}
    for precision in ("fp16", "bf16"):
        yield {f"in_{precision}": in_half(name, precision, policy, few)}
        yield {f"nan_in_{precision}": nan_at_each_step(name, precision, policy)}


if __name__ == "__main__":
    main()
