"""Compare techniques, each by itself and combined, in whole runs of a small trained CogVideoX: speed and error.

    OMP_NUM_THREADS=1 BENCHMARK_CLOCK=processor python scripts/benchmarks/techniques.py [--rounds 7] [--out DIR]

A run is 50 steps of diffusers' own pipeline with 16 videos at once, from encoded prompts. In a round, every contestant
makes the same run once. Speed is the ratio to diffusers' own module in fp32 within a round. Error is the norm of the
difference from that module's latents, divided by their norm. Both are medians over rounds; each round has its own seed.
Compiling happens before the first round. Techniques that are faster only on a card have an error and no speed.

The model has 3 million parameters, so Python's overhead for each call weighs more than in any published model: speeds
show whether a technique helps on a CPU, and nothing about a card. Its layers are narrower than those that are quantised
in published models; here they are quantised anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.compile.backends import choose_backend
from comfyui_onediff_guard.precision import quantised
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.shallow_copy import with_forward
from measure import CLOCK, head, interleave, new_parser, relative_error, write_json
from step_cache import TARGET, Subject, spread

CPU = torch.device("cpu")
BATCH = 16  # videos per run
EAGER, WHOLE = "diffusers", "diffusers, torch.compile whole"  # in fp32, like all names without a precision
CACHE = CachePolicy(TARGET)


@dataclass(frozen=True)
class Technique:
    """One way to make the run. denoiser: makes the pipeline's denoiser from diffusers' module."""

    precision: str = "fp32"
    backend: str = "eager"
    cache: CachePolicy | None = None
    denoiser: Callable[[torch.nn.Module], Any] | None = None
    timed: bool = True

    def runs(self) -> Callable[[int], tuple[torch.Tensor, Any]]:
        """Return a function from a seed to latents and report."""
        subject = Subject("cogvideox", self.precision)
        backend = choose_backend(self.backend, CPU)
        handle = replace(subject.handle, step_cache=self.cache, backend=backend)
        make = self.denoiser
        if make is None:
            return lambda seed: subject.sampled(handle, seed, batch=BATCH)
        made: list[Any] = []

        def plain(stage: Any) -> Any:
            if not made:
                module, dtype = make(stage.module), DTYPES[self.precision]
                made.append(with_forward(stage.module, lambda **given: module(**_cast(given, dtype))))
            return made[0]

        return lambda seed: subject.sampled(handle, seed, batch=BATCH, denoiser=plain)


TECHNIQUES = {
    EAGER: Technique(denoiser=lambda module: module),
    "diffusers again": Technique(denoiser=lambda module: module),
    WHOLE: Technique(denoiser=torch.compile),
    "ours": Technique(),
    "compiled": Technique(backend="inductor"),
    "step cache 2 %": Technique(cache=CACHE),
    "compiled, step cache": Technique(backend="inductor", cache=CACHE),
    "diffusers, bf16": Technique("bf16", denoiser=lambda module: module),
    "bf16, compiled": Technique("bf16", backend="inductor"),
    "bf16, compiled, step cache": Technique("bf16", backend="inductor", cache=CACHE),
    "int8, compiled": Technique("int8", backend="inductor"),
    "int8, compiled, step cache": Technique("int8", backend="inductor", cache=CACHE),
    "fp16": Technique("fp16", timed=False),
    "fp16, step cache": Technique("fp16", cache=CACHE, timed=False),
}


def _cast(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Cast latents and prompt to the module's dtype, as in a pipeline that is entirely in it."""
    names = ("hidden_states", "encoder_hidden_states")
    return {name: value.to(dtype) if name in names else value for name, value in given.items()}


class Run:
    """A contestant: each call is its next run; the seed is the same for all contestants in a round."""

    def __init__(self, technique: Technique):
        self._run = technique.runs()
        self.latents: list[torch.Tensor] = []
        self.cached: list[int] = []

    def __call__(self) -> None:
        latents, report = self._run(len(self.latents))
        self.latents.append(latents)
        self.cached.append(report.cache.cached if report.cache else 0)


def measured(rounds: int) -> dict[str, dict[str, Any]]:
    runs = {name: Run(technique) for name, technique in TECHNIQUES.items()}
    timed: dict[str, Any] = {name: run for name, run in runs.items() if TECHNIQUES[name].timed}
    seconds = interleave(timed, rounds, CPU)
    for name, run in runs.items():
        while name not in timed and len(run.latents) < rounds + 1:
            run()
    rows: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        errors = [relative_error(mine, exact) for mine, exact in zip(run.latents, runs[EAGER].latents, strict=True)]
        rows[name] = {"error": round(statistics.median(errors), 5), "error_spread": spread(errors)}
        if any(run.cached):
            rows[name]["steps_cached"] = spread(list(map(float, run.cached)))
        if name in seconds:
            rows[name] |= {
                "seconds": round(statistics.median(seconds[name]), 3),
                "over_diffusers": _ratio(seconds[EAGER], seconds[name]),
                "over_whole": _ratio(seconds[WHOLE], seconds[name]),
            }
    return rows


def _ratio(of: list[float], taken: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(of, taken, strict=True))
    quarter = len(ratios) // 4
    found = {"median": statistics.median(ratios), "from": ratios[quarter], "to": ratios[-1 - quarter]}
    return {name: round(value, 3) for name, value in found.items()}


def text(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| | speed, diffusers = 1 | torch.compile whole = 1 | error to fp32 |", "|---|---|---|---|"]
    for name, row in rows.items():
        ratios = [row.get(key) for key in ("over_diffusers", "over_whole")]
        said = [f"{r['median']:.2f} ({r['from']:.2f} to {r['to']:.2f})" if r else "not measured" for r in ratios]
        lines.append(f"| {name} | {said[0]} | {said[1]} | {row['error']:.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all contestants, each with its own seed")
    args = parser.parse_args()
    quantised.LEAST = 128
    with torch.inference_mode():
        rows = measured(args.rounds)
    model = "CogVideoX, 3.0 M parameters, trained (scripts/benchmarks/trained.py), 50 steps"
    result = head("techniques", CPU, clock=CLOCK, model=model, rows=rows)
    print(text(rows))
    print(f"written to {write_json(result, args.out, 'cpu')}")


if __name__ == "__main__":
    main()
