"""What a run did, step by step, and why it ran in that dtype."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .accumulation import Switch
from .policy import Component, Plan


@dataclass(frozen=True)
class StepRecord:
    """One guarded call of a stage."""

    stage: str  # "denoiser", "text_encoder", "vae_decode"
    step: int  # counted from 0 within its stage
    timestep: float | None
    dtype: str  # in which the output that was handed on was computed
    outcome: str  # "finite", "rerun", "non-finite", "saturated"
    seconds: float
    largest: float | None  # max |x| of the output handed on
    note: str = ""


@dataclass
class RunReport:
    """Collected while a stage runs; `summary()` for people, `as_dict()` for programs."""

    variant: str
    architecture: str
    plan: Plan
    backend: str = ""
    backend_reason: str = ""
    switches: tuple[Switch, ...] = ()
    stream_peak: float | None = None  # max |x| of the residual stream, where it was measured for the fold
    fold_bits: int | None = None  # the stream is scaled by 2^-fold_bits; None where the plan does not fold
    calls_per_step: int = 1  # of the denoiser
    before: list[RunReport] = field(default_factory=list)  # stages that ran first, to encode an image
    notes: tuple[str, ...] = ()  # what is unusual about the model, or was mended when it was loaded
    steps: list[StepRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        self.steps.append(record)

    @property
    def reruns(self) -> int:
        return sum(step.outcome == "rerun" for step in self.steps)

    def count_reruns(self) -> str:
        return _count(self.reruns, "rerun")

    @property
    def failed(self) -> int:
        return sum(step.outcome in ("non-finite", "saturated") for step in self.steps)

    def summary(self) -> str:
        """One line: why this dtype, how many calls, how many reruns."""
        denoising = self.plan.component is Component.DENOISER
        stage = "" if denoising else f"{self.plan.component.words}: "
        if not self.steps:
            return f"{stage}{self.plan.reason}; nothing to compute, all of it was remembered."
        noun = "step" if denoising else "call"
        counts = f"{_count(-(-len(self.steps) // self.calls_per_step), noun)}, {self.count_reruns()}"
        if self.failed:
            counts += f", {self.failed} NOT FINITE: the result is broken; choose precision 'auto' or 'fp16'"
        return f"{stage}{self.plan.reason}{self._fold()}; {counts}."

    def _fold(self) -> str:
        if self.fold_bits is None:
            return ""
        return f", folded by 2^-{self.fold_bits}" if self.fold_bits else ", not folded: its stream fits"

    def text(self) -> str:
        """The summary, then a line per step and the switches."""
        lines = [
            *(report.summary() for report in self.before),
            self.summary(),
            f"{self.variant} on {self.architecture}",
            f"backend: {self.backend} ({self.backend_reason})",
            f"guard {self.plan.guard_reason}",
            f"fold: {self.plan.fold_reason}",
            *(f"note: {note}" for note in self.notes),
        ]
        if self.stream_peak is not None:
            lines.append(f"first step in fp32: the residual stream peaks at {self.stream_peak:.4g}, fp16 ends at 65504")
        lines += [f"{s.name}={s.value} (by {s.set_by}: {s.reason})" for s in self.switches]
        for s in [step for report in (*self.before, self) for step in report.steps]:
            at = "" if s.timestep is None else f" t={s.timestep:g}"
            largest = "" if s.largest is None else f", max |x| {s.largest:.4g}"
            lines.append(
                f"{s.stage} {s.step + 1}{at}: {s.dtype}, {s.outcome}, {s.seconds:.3f} s{largest}{_dash(s.note)}"
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        outcomes = Counter(step.outcome for step in self.steps)
        return asdict(self) | {
            "summary": self.summary(),
            "reruns": self.reruns,
            "outcomes": dict(outcomes),
            "seconds": sum(step.seconds for step in self.steps),
        }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _dash(note: str) -> str:
    return f" — {note}" if note else ""
