"""What a workflow came to in one precision, beside the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .frames import Likeness


@dataclass(frozen=True)
class Outcome:
    """What one precision came to."""

    precision: str
    stages: list[dict[str, Any]]  # the nodes' reports
    total_seconds: float  # with loading, and whatever else the workflow does
    frames: np.ndarray = field(repr=False)  # uint8 [frames, height, width, 3]
    difference: np.ndarray | None = field(repr=False)  # of the middle frame from the reference's, [height, width]
    likeness: Likeness
    from_files: bool  # where NaN is black

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for stage in self.stages for step in stage["steps"] if step["stage"] == "denoiser"]

    @property
    def seconds(self) -> float:
        return sum(step["seconds"] for step in self.steps)

    @property
    def reruns(self) -> int:
        return sum(step["outcome"] == "rerun" for step in self._calls())

    @property
    def failed(self) -> int:
        """Calls of any stage whose result stayed broken."""
        return sum(step["outcome"] in ("non-finite", "saturated") for step in self._calls())

    @property
    def finite(self) -> int:
        """Frames without NaN. In a file those are black: the reports tell them from what is meant to be black."""
        hidden = self.likeness.black if self.from_files and self.failed else 0
        return self.likeness.finite - hidden

    @property
    def plan(self) -> str:
        """How the denoiser ran, in a few words."""
        report = next((stage for stage in self.stages if stage["plan"]["component"] == "denoiser"), None)
        if report is None:
            return "not reported"
        words = [report["plan"]["dtype"]]
        if quantised := report["plan"].get("quantised"):
            words.append(f"large linear layers in {quantised}")
        if wide := report.get("wide"):
            words.append(wide)
        learned = report.get("learned") or {}
        for how, parts in (("wide", learned.get("wide_parts")), ("in fp32", learned.get("islands"))):
            if parts:
                words.append(f"{len(parts)} block{'s' * (len(parts) > 1)} {how}")
        if left := learned.get("unquantised"):
            words.append(f"{len(left)} of them unquantised")
        if learned.get("whole_run_fp32"):
            words.append("then fp32")
        if words == ["fp16"] and not report["plan"]["guarded"]:
            words.append("neither made safe nor guarded")
        return ", ".join(words)

    def _calls(self) -> list[dict[str, Any]]:
        return [step for stage in self.stages for each in (*stage.get("before", ()), stage) for step in each["steps"]]


@dataclass(frozen=True)
class Failed:
    """A precision that raised."""

    precision: str
    error: str


@dataclass(frozen=True)
class Comparison:
    workflow: str  # file name
    outcomes: list[Outcome | Failed]  # the reference first
    fps: float

    @property
    def errors_from(self) -> str:
        return "8-bit PNG files, whose steps are 1/255" if self.runs[0].from_files else "float frames"

    @property
    def runs(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Outcome)]

    @property
    def failures(self) -> list[Failed]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failed)]

    @property
    def middle(self) -> int:
        """The frame that is shown, from 0."""
        return len(self.runs[0].frames) // 2
