"""Reports: what a run did, step by step, and why it ran in its dtype."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..trust.message import Message, joined
from ..trust.plain import for_json
from .accumulation import Switch
from .memory import Memory
from .overrides import RANGE, STAY, PrecisionOverrides
from .policy import Component, Plan

if TYPE_CHECKING:
    from .error_estimate import CacheUse


@dataclass(frozen=True)
class Rerun:
    """The reason, the cost and the consequence of an fp32 rerun."""

    module: str  # the first module that exceeds the dtype's range; "" if unknown
    peak: float | None  # its max |x| in fp32, if measured
    action: str  # what changes for the next calls; "" if nothing does
    seconds: float  # without the failed attempt
    extra_bytes: int | None  # peak; measured on CUDA, elsewhere the largest layer's weights in float32


@dataclass(frozen=True)
class StepRecord:
    """One guarded call of a stage."""

    stage: str  # "denoiser", "text_encoder", "vae_decode"
    step: int  # counted from 0 within its stage
    timestep: float | None
    dtype: str  # of the computation that gave the output
    outcome: str  # "finite", "rerun", "non-finite", "saturated"
    seconds: float
    largest: float | None  # max |x| of the output
    note: str = ""
    rerun: Rerun | None = None
    cached: bool = False  # most of it was extrapolated from earlier steps


@dataclass
class RunReport:
    """The record of a stage's run: `summary()` is for people, `as_dict()` for programs."""

    variant: str
    architecture: str
    plan: Plan
    backend: str = ""
    backend_reason: str = ""
    graphs: int | None = None  # graphs that dynamo traced in this run; None if nothing is compiled
    graphs_kept: int = 0  # of these, the ones whose code came from the compile cache
    switches: tuple[Switch, ...] = ()
    protection: str = ""  # "overflow protection", if it was on
    learned: PrecisionOverrides | None = None  # the overrides at the end of the run, if it may learn
    calls_per_step: int = 1  # of the denoiser
    in_calls: bool = False  # counts calls instead of steps: the number of calls per step is unknown
    ended_by: str = ""  # what stopped the run early, and at which call; "" if it finished
    cache: CacheUse | None = None  # of the step cache; None without one
    memory: Memory | None = None  # None if it cannot be measured
    before: list[RunReport] = field(default_factory=list)  # stages that ran first, to encode an image
    notes: tuple[str, ...] = ()  # facts about the model, and repairs at its loading
    warnings: tuple[str, ...] = ()  # shown without opening the report
    steps: list[StepRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        self.steps.append(record)

    def cached(self, cached: bool) -> None:
        """Note whether the last call was cached."""
        self.steps[-1] = replace(self.steps[-1], cached=cached)

    def account(self, use: CacheUse) -> None:
        """Record the use of the step cache, and warn if its estimate is over the target."""
        self.cache = use
        self.warnings += tuple(filter(None, [use.warning()]))

    def note(self, line: str, instead_of: str = "") -> None:
        """Add a line to the notes, once.

        instead_of: the beginning of lines that it replaces; "" replaces none.
        """
        if instead_of:
            self.notes = tuple(note for note in self.notes if not note.startswith(instead_of))
        self.notes += () if line in self.notes else (line,)

    @property
    def reruns(self) -> int:
        return sum(step.outcome == "rerun" for step in self.steps)

    def recomputed(self) -> str:
        """Say how many calls were recomputed in fp32; "" if none was."""
        return Message("{} recomputed in fp32", self.reruns) if self.reruns else ""

    @property
    def failed(self) -> int:
        return sum(step.outcome in ("non-finite", "saturated") for step in self.steps)

    def cells(self) -> list[str]:
        """Return the state of each step, the worst of its calls: "cached", "half", "fp32", "rerun" or "failed"."""
        calls = [_cell(step) for step in self.steps]
        starts = range(0, len(calls), self.calls_per_step)
        return [max(calls[start : start + self.calls_per_step], key=_CELLS.index) for start in starts]

    def summary(self) -> str:
        """Say in one line why this dtype was chosen, and how its calls ended."""
        component, cells = self.plan.component, self.cells()
        stage = "" if component is Component.DENOISER else Message("{}: ", component.words)
        if not self.steps:
            why = self.ended_by or Message("nothing new to compute")
            return Message("{}{}; {}.", stage, self.plan.reason, why)
        made = counted(len(cells), "1 call", "{} calls") if self.in_calls else _of(component, len(cells))
        if self.reruns and self.calls_per_step > 1:
            made = Message("{}, {} of {} calls recomputed in fp32", made, self.reruns, len(self.steps))
        elif self.reruns:
            made = Message("{}, {} recomputed in fp32", made, self.reruns)
        if failed := cells.count("failed"):
            made = Message("{}, {} with NaN, infinite or clipped values", made, failed)
            if not self.ended_by:
                made = Message("{}: the result is broken; {}", made, self._what_to_choose())
        elif not self.reruns and not self.ended_by:
            made = Message("{}, fine", made) if len(cells) == 1 else Message("{}, all fine", made)
        made = Message("{}; {}", made, self.ended_by) if self.ended_by else made
        return Message("{}{}{}; {}.", stage, self.plan.reason, self._otherwise(), made)

    @property
    def _plain(self) -> bool:
        """Whether precision 'fp16 (plain)' keeps the guard from acting, and not its own setting."""
        return self.plan.half and not self.plan.guarded

    def _what_to_choose(self) -> Message:
        """Say which setting prevents a broken result."""
        if self._plain:
            return Message("choose precision 'auto' or 'fp16'")
        return Message("set the NaN Guard's on_failure to 'rerun'")

    def finding(self) -> str:
        """Say in one line which call failed first, where, and what followed; "" if none failed."""
        step = next((step for step in self.steps if step.outcome != "finite"), None)
        if step is None:
            return ""
        said = joined(": ", (self._which(step), _wrong(step, self.plan.dtype)))
        if self.ended_by and step.outcome != "rerun":
            return Message("{}.", said)
        if step.outcome != "rerun" and self._plain:
            return Message("{}; only the NaN Guard finds the layer.", said)
        if step.outcome != "rerun":
            return Message("{}; on_failure 'rerun' also finds the layer.", said)
        action = step.rerun.action if step.rerun else ""
        then = Message("Recomputed in fp32; {}.", action) if action else Message("Recomputed in fp32.")
        return joined(" ", (Message("{}.", said), then))

    def _which(self, step: StepRecord) -> Message:
        of, number = self.plan.component, step.step // self.calls_per_step + 1
        denoising, text = of is Component.DENOISER, of is Component.TEXT_ENCODER
        if self.in_calls:
            return Message("Call {}", number)
        return Message("Step {}" if denoising else "Prompt {}" if text else "Part {}", number)

    def compiled(self) -> str:
        """Say, after a comma, how many graphs were compiled or came from the cache; "" if nothing is compiled."""
        if self.graphs is None:
            return ""
        graphs = Message(", {}", counted(self.graphs, "1 graph", "{} graphs"))
        if not self.graphs_kept:
            return Message("{} newly compiled", graphs)
        kept = "" if self.graphs_kept == self.graphs else Message("{} of them ", self.graphs_kept)
        return Message("{}, {}from the cache of earlier runs", graphs, kept)

    def _otherwise(self) -> str:
        """Say, after a semicolon, which calls did not run in the plan's dtype; "" if all did."""
        learned = self.learned.in_words() if self.learned else []
        stays = STAY if self.plan.half and any(_cell(step) == "fp32" for step in self.steps) else ""
        said = dict.fromkeys([self.protection, *learned, stays, self.cache.in_short() if self.cache else ""])
        return joined("", (Message("; {}", words) for words in said if words))

    def text(self) -> str:
        """Return the summary and the plan, then each step, the notes, and last the switches."""
        protected = self.plan.overflow_protection_reason
        if self.protection and not self.plan.overflow_protection:
            protected = "on, since a call of this or an earlier run failed without it, or a profile has it"
        lines = [
            *(report.summary() for report in self.before),
            self.summary(),
            f"{self.variant} on {self.architecture}",
            f"backend: {self.backend} ({self.backend_reason}){self.compiled()}",
            f"guard {self.plan.guard_reason}",
            f"overflow protection {protected}",
            *([f"quantised: {self.plan.quantised_reason}"] if self.plan.quantised_reason else ()),
            *([f"fp16 accumulation {self.plan.fp16_sums_reason}"] if self.plan.fp16_sums_reason else ()),
            *([f"step cache: {self.cache}"] if self.cache else ()),
            *([f"memory: {self.memory}"] if self.memory else ()),
        ]
        lines += [line for report in (*self.before, self) for step in report.steps for line in report._lines(step)]
        lines += [f"note: {note}" for note in (*self.warnings, *self.notes)]
        lines += [f"{s.name}={s.value} (by {s.set_by}: {s.reason})" for s in self.switches]
        return "\n".join(lines)

    def _lines(self, step: StepRecord) -> list[str]:
        """Return one line for a step, and one for its rerun."""
        component, call = self.plan.component, step.step % self.calls_per_step + 1
        which = self._which(step).lower()
        which += f", call {call} of {self.calls_per_step}" if self.calls_per_step > 1 else ""
        which = which if component is Component.DENOISER else f"{component.words}, {which}"
        at = "" if step.timestep is None else f" (t={step.timestep:g})"
        came_to = _OUTCOMES[step.outcome] + (", from the step cache" if step.cached else "")
        largest = "" if step.largest is None else f", largest value {_amount(step.largest)}"
        note = f" — {step.note}" if step.note else ""
        line = f"{which}{at}: {step.dtype}, {came_to}, {step.seconds:.2f} s{largest}{note}"
        return [line, f"    recomputed in fp32: {_rerun(step.rerun)}"] if step.rerun else [line]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, with totals over the steps."""
        outcomes = Counter(step.outcome for step in self.steps)
        facts = asdict(self) | {
            "before": [report.as_dict() for report in self.before],
            "summary": self.summary(),
            "finding": self.finding(),
            "text": self.text(),
            "cells": self.cells(),
            "ended": bool(self.ended_by),
            "reruns": self.reruns,
            "outcomes": dict(outcomes),
            "seconds": sum(step.seconds for step in self.steps),
            "rerun_seconds": sum(step.rerun.seconds for step in self.steps if step.rerun),
        }
        return for_json(facts)


def together(reports: Sequence[RunReport], steps: list[StepRecord]) -> RunReport:
    """Merge the reports of executors that computed at the same time.

    steps: those of all executors, in the order in which they ended.
    """

    def each(values: Iterable[str]) -> str:
        return joined("; ", dict.fromkeys(values))

    plan = replace(reports[0].plan, reason=each(report.plan.reason for report in reports))
    return replace(
        reports[0],
        architecture=each(report.architecture for report in reports),
        plan=plan,
        switches=tuple(dict.fromkeys(switch for report in reports for switch in report.switches)),
        protection=each(filter(None, (report.protection for report in reports))),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        steps=steps,
    )


_CELLS = ("cached", "half", "fp32", "rerun", "failed")  # from the best


def _cell(step: StepRecord) -> str:
    finite = "cached" if step.cached else "fp32" if step.dtype == "fp32" else "half"
    return {"finite": finite, "rerun": "rerun"}.get(step.outcome, "failed")


def counted(number: int, one: str, several: str) -> Message:
    """one, several: templates, "1 step" and "{} steps"."""
    return Message(one) if number == 1 else Message(several, number)


def _of(component: Component, number: int) -> Message:
    """Say for how many steps, prompts or parts."""
    if component is Component.DENOISER:
        return counted(number, "1 step", "{} steps")
    if component is Component.TEXT_ENCODER:
        return counted(number, "1 prompt", "{} prompts")
    return counted(number, "1 part", "{} parts")


def _amount(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.2g}"


PROBLEMS = {"non-finite": Message("NaN or infinite"), "saturated": Message("clipped")}  # of outcomes, in words
_OUTCOMES = {"finite": "OK", "rerun": "recomputed in fp32"} | PROBLEMS


def _wrong(step: StepRecord, dtype: str) -> Message:
    """Say what was wrong with a failed step, and where, if known."""
    if " it raised " in step.note:
        return Message("{}", step.note)
    rerun, ends = step.rerun, RANGE.get(dtype, math.inf)
    if rerun and rerun.module and rerun.peak is not None and ends < rerun.peak < math.inf:
        reached, end = _amount(rerun.peak), _amount(ends)
        if reached == end:
            return Message("a value reached {} in {}", reached, rerun.module)
        return Message("a value reached {} ({} ends at {}) in {}", reached, dtype, end, rerun.module)
    known = {"non-finite": Message("NaN or infinite values"), "saturated": Message("clipped values")}
    wrong = known.get(step.outcome, Message("NaN, infinite or clipped values"))
    return Message("{} in {}", wrong, rerun.module) if rerun and rerun.module else wrong


def _rerun(rerun: Rerun) -> str:
    peak = "" if rerun.peak is None else f", which reached {_amount(rerun.peak)}"
    where = f"first in '{rerun.module}'{peak}" if rerun.module else ""
    more = "" if rerun.extra_bytes is None else f"{rerun.extra_bytes / 1e6:.3g} MB more memory"
    return "; ".join(filter(None, [f"{rerun.seconds:.2f} s", more, where, rerun.action]))
