"""What a stage's report has to hold for runs to be compared: other people's servers send them too."""

from __future__ import annotations

from ...trust.foreign import Foreign


class StepReport(Foreign):
    seconds: float
    stage: str
    outcome: str


class PlanReport(Foreign):
    component: str
    dtype: str
    guarded: bool


class LearnedReport(Foreign):
    islands: list[str] | tuple[str, ...] | None = None
    wide_parts: list[str] | tuple[str, ...] | None = None
    whole_run_fp32: bool | None = None


class EarlierReport(Foreign):
    """A stage within another, the image's encoder before the sampler for instance."""

    steps: list[StepReport] | tuple[StepReport, ...]


class StageReport(EarlierReport):
    plan: PlanReport
    before: list[EarlierReport] | tuple[EarlierReport, ...] = []
    wide: str | None = None
    learned: LearnedReport | None = None
