"""What a probe found: in words, for JSON, and what is recommended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from ..trust.plain import for_json
from .arch import Architecture
from .overrides import ModuleStructure
from .policy import Plan
from .probe import Entry, Probe, Probed, Verdict
from .profile_store import Profile

WORST = 10

Result = TypeVar("Result")


class Measured:
    """A denoiser's calls in fp32, watched and timed."""

    def __init__(self, denoiser: torch.nn.Module, anatomy: ModuleStructure):
        self.probe = Probe(denoiser, anatomy)
        self.healthy_seconds = 0.0  # of one call
        self._seconds: list[float] = []

    @property
    def seconds(self) -> float:
        """What all calls in fp32 took."""
        return sum(self._seconds)

    def call(
        self, in_fp32: Callable[[], Result], healthy: Callable[[], object], twin: torch.nn.Module | None = None
    ) -> Result:
        """What the call in fp32 gives. healthy: the same call as it is without the probe; made twice, once a run.
        twin: the denoiser's, where another copy of it is called."""
        started = time.perf_counter()
        output = self.probe.watch(in_fp32, twin)
        self._seconds.append(time.perf_counter() - started)
        for _ in range(0 if self.healthy_seconds else 2):  # the first makes room, and chooses kernels
            started = time.perf_counter()
            healthy()
            self.healthy_seconds = time.perf_counter() - started
        return output


@dataclass(frozen=True)
class Probing:
    """What was measured, and what is recommended."""

    model: str
    architecture: Architecture
    plan: Plan  # as it is
    sampled: str  # what, for people: "64×64, 9 frames, seed 0"
    probed: Probed
    timesteps: tuple[float | None, ...]
    seconds: float  # of the denoiser's calls
    healthy_seconds: float  # of as many in the plan's dtype, not compiled
    chosen: Verdict
    verdicts: tuple[Verdict, ...]  # of each dtype
    to_apply: str  # how the user does what is recommended; "" where nothing has to be done
    profile: Profile | None = None  # None where there is nothing to learn

    @property
    def profile_text(self) -> str:
        return self.profile.text() if self.profile else ""

    @property
    def headline(self) -> str:
        return f"Recommended on {self.architecture}: {self.chosen.plan}"

    @property
    def cost(self) -> str:
        steps = len(self.probed.steps)
        times = self.seconds / self.healthy_seconds if self.healthy_seconds else 0.0
        return (
            f"{steps} step{'' if steps == 1 else 's'} in {self.seconds:.3g} s, {times:.2g} × as long as healthy ones "
            f"in {self.plan.dtype}; runs without the probe pay nothing"
        )

    def text(self) -> str:
        """For people."""
        lines = [
            self.headline,
            f"    because {self._because()}",
            f"    {f'To apply it: {self.to_apply}.' if self.to_apply else 'Nothing has to be set for it.'}",
            "Each precision:",
            *(f"    {verdict.plan}: {verdict.reason}" for verdict in self.verdicts),
            f"The largest of {len(self.probed.entries())} layers and blocks:",
            *(f"    {self._in_words(entry)}" for entry in self.probed.worst(WORST)),
        ]
        if small := self._subnormal():
            share, name = small.values.subnormal, small.name
            lines.append(f"Most subnormal in fp16: {share:.1%} of what '{name}' puts out, at step {small.step + 1}")
        if apart := self.probed.too_far_apart():
            named = ", ".join(f"'{name}' {share:.3g} ×" for name, share in [*apart.items()][:WORST])
            lines.append(f"Too far apart for scaled products in fp16: {len(apart)} layers, by bf16's error: {named}")
        return "\n".join([*lines, f"Cost: {self.cost}"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        worst = [asdict(entry) | {"step": entry.step + 1} for entry in self.probed.worst(WORST)]
        return for_json(
            {
                "summary": self.headline,
                "model": self.model,
                "architecture": self.architecture.name,
                "dtype": self.chosen.dtype,
                "plan": self.chosen.plan,
                "wide": self.chosen.wide,
                "learned": asdict(self.chosen.learned),
                "reason": self._because(),
                "verdicts": [asdict(v) | {"plan": v.plan, "fits": v.fits} for v in self.verdicts],
                "worst": worst,
                "too_far_apart": self.probed.too_far_apart(),
                "measured_steps": len(self.probed.steps),
                "timesteps": self.timesteps,
                "seconds": self.seconds,
                "healthy_seconds": self.healthy_seconds,
                "profile": self.profile_text,
            }
        )

    def name_of(self, entry: Entry) -> str:
        in_stream = self.probed.anatomy.stream is not None and entry.name in self.probed.anatomy.blocks
        return f"residual stream behind {entry.name}" if in_stream else entry.name

    def needs(self) -> list[str]:
        """A line for each precision."""
        emulated = "" if self.architecture.native_bf16 else f", but {self.architecture} has no native bf16"
        return [
            f"{v.dtype}: {v.plan.removeprefix(v.dtype).strip() or 'fits'}{emulated if v.dtype == 'bf16' else ''}"
            for v in self.verdicts
        ]

    def _in_words(self, entry: Entry) -> str:
        values, said = entry.values, f"{entry.reach:.3g} in {self.name_of(entry)}, step {entry.step + 1}"
        if entry.reach == values.peak.output and values.over_eighth:
            said += f": {values.over_half:.2%} over 1/2 of fp16's range, {values.over_eighth:.2%} over 1/8"
        return said

    def _because(self) -> str:
        if self.chosen.dtype == self.plan.dtype:
            return f"{self.plan.reason}; {self.chosen.reason}"
        own = next(verdict for verdict in self.verdicts if verdict.dtype == self.plan.dtype)
        return f"{own.dtype} does not hold it: {own.reason}"

    def _subnormal(self) -> Entry | None:
        entries = [entry for entry in self.probed.entries() if entry.values.subnormal > 0]
        return max(entries, key=lambda entry: entry.values.subnormal, default=None)
