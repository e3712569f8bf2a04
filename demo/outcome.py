"""The demo's runs, and what came of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MODEL = "toy-cogvideox"
INSIDE = "toy-cogvideox-inside"  # the same, with hidden activations of one block that leave fp16's range too
TOLERANCE = 2e-2  # of the value range; what a guarded fp16 run may differ from fp32


@dataclass(frozen=True)
class Case:
    """What one run shows."""

    title: str
    precision: str
    video: str  # name of its file
    model: str = MODEL


PLAIN = Case("fp16 (plain)", "fp16 (plain)", "fp16-plain")
PROTECTED = Case("fp16, protected", "fp16", "fp16-guarded")
INSIDE_TOO = Case("fp16, inside a block too", "fp16", "fp16-inside", INSIDE)
EXACT = Case("fp32", "fp32", "fp32")
RUNS = (PLAIN, PROTECTED, INSIDE_TOO, EXACT)


@dataclass(frozen=True)
class Outcome:
    """One run's video, and what its stages reported."""

    case: Case
    images: torch.Tensor  # [frames, height, width, 3], 0 to 1, float32
    video: Path
    stages: list[dict[str, Any]]  # the nodes' reports, in the order they ran
    seconds: float

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for stage in self.stages for step in stage["steps"] if step["stage"] == "denoiser"]

    def count(self, *outcomes: str) -> int:
        """How many denoising steps ended so."""
        return sum(step["outcome"] in outcomes for step in self.steps)

    @property
    def broken_frames(self) -> int:
        return int((~self.images.isfinite()).flatten(1).any(1).sum())

    def difference(self, reference: Outcome) -> float:
        """max |difference| from another run's frames, whose range is 1; NaN where this one is NaN."""
        return (self.images - reference.images).abs().max().item()

    def verdict(self, reference: Outcome) -> str:
        """'reference', 'right', 'wrong' or 'black'."""
        if self is reference:
            return "reference"
        if self.broken_frames:
            return "black"
        return "right" if self.difference(reference) <= TOLERANCE else "wrong"

    def numbers(self, reference: Outcome) -> str:
        """What came of it, in words for people."""
        frames, steps = len(self.images), len(self.steps)
        if self is reference:
            return f"{steps} steps in fp32 · every frame finite"
        broken = self.broken_frames
        told = [f"{broken} of {frames} frames NaN" if broken else "every frame finite"]
        for outcome, words in {"non-finite": "NaN or infinite", "saturated": "clipped"}.items():
            if failed := self.count(outcome):
                told.append(f"{failed} of {steps} steps {words}")
        if reruns := self.count("rerun"):
            told.append(f"{reruns} of {steps} steps recomputed in fp32")
        if not broken:
            told.append(f"max difference from fp32 {self.difference(reference):.4f}")
        return " · ".join(told)
