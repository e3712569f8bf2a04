"""Estimate the speed of all techniques together, from published times and from calls counted here.

    python scripts/benchmarks/stack.py [--out scripts/benchmarks/results]

Nothing is run. The factor of compiling or fp8 is a ratio of two published times of the same model on the same card, or
of the most similar model if the source says so. The calls that a step cache skips are counted on small trained models
(step_cache.py), and subtracted from the denoiser's share of the operations only. Factors are multiplied as if they were
independent, which is not known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from measure import RESULTS, head, new_parser, write_json

TORCHAO = "published: diffusers-torchao, CogVideoX-5B, 49 frames, 50 steps"
PR_514 = "published: onediff PR 514, SVD"
CACHE = "step_cache-cpu-2026-11-28.json"


@dataclass(frozen=True)
class Model:
    """TFLOP of a step with guidance, and of decoding; both counted at full size."""

    name: str
    step: float
    steps: int
    decode: float
    cached_as: str  # its name in the result of step_cache.py

    @property
    def denoising(self) -> float:
        """The denoiser's share of all operations, 0..1."""
        steps = self.step * self.steps
        return steps / (steps + self.decode)


@dataclass(frozen=True)
class Factor:
    """The speed-up of a run by one technique."""

    technique: str
    times: float
    source: str


@dataclass(frozen=True)
class Estimate:
    model: Model
    card: str
    factors: tuple[Factor, ...]
    times: float = field(init=False)

    def __post_init__(self) -> None:
        times = 1.0
        for factor in self.factors:
            times *= factor.times
        object.__setattr__(self, "times", times)


COGVIDEOX = Model("CogVideoX-5B", 664, 50, 315, "cogvideox")
SVD = Model("SVD-XT", 160, 25, 169, "")  # without a step cache
COMPILED = {
    (COGVIDEOX, "H100"): Factor("compiled", 112.4 / 87.5, f"{TORCHAO}: 112.4 s, 87.5 s"),
    (COGVIDEOX, "RTX 4090"): Factor(
        "compiled",
        2.47 / 2.00,
        "published: kijai/ComfyUI-CogVideoXWrapper issue 264, CogVideoX-1.5-5B-I2V: 2.47 and 2.00 s a step",
    ),
    (SVD, "H100"): Factor("compiled", 50.9 / 43.4, f"{PR_514}, on an A100: 50.9 s, 43.4 s"),
    (SVD, "RTX 4090"): Factor("compiled", 50.9 / 43.4, f"{PR_514}, on an A100: 50.9 s, 43.4 s"),
}
MORE = {(COGVIDEOX, "H100"): Factor("fp8", 87.5 / 75.3, f"{TORCHAO}, compiled: 87.5 s, with fp8 75.3 s")}


def cached(model: Model, skipped: float, counted: str) -> Factor:
    """Return a step cache's factor. skipped: share of the denoiser's operations, 0..1."""
    times = 1 / (1 - skipped * model.denoising)
    part = (
        f"{skipped:.1%} of the denoiser skipped at a drift of 2 % or less ({counted}), {model.denoising:.1%} of the run"
    )
    return Factor("step cache", times, part)


def shares(result: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Return each small model's skipped share, and what was counted; without models that were not measured."""
    found = {}
    if "cogvideox" in result:
        found["cogvideox"] = result["cogvideox"]["target"]["block_calls_skipped"]["mean"], "calls of blocks"
    return found


def main() -> None:
    args = new_parser(__doc__).parse_args()
    measured = shares(json.loads((RESULTS / CACHE).read_text(encoding="utf-8")))
    estimates = []
    for (model, card), compiled in COMPILED.items():
        factors = [compiled, MORE.get((model, card))]
        if model.cached_as in measured:
            factors.append(cached(model, *measured[model.cached_as]))
        estimates.append(Estimate(model, card, tuple(filter(None, factors))))
    print("| model | card | compiled | fp8 | step cache | together, × diffusers eager |\n|---|---|---|---|---|---|")
    for each in estimates:
        times = {factor.technique: f"{factor.times:.2f}" for factor in each.factors}
        cells = [times.get(technique, "–") for technique in ("compiled", "fp8", "step cache")]
        print(f"| {each.model.name} | {each.card} | {' | '.join(cells)} | {each.times:.2f} |")
    result = head("stack", "none: an estimate, not run", estimates=[asdict(each) for each in estimates])
    print(f"written to {write_json(result, args.out, 'paper')}")


if __name__ == "__main__":
    main()
