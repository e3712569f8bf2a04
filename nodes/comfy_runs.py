"""One run of ComfyUI's own MODEL or VAE under the guard: a guard for each executor, and one report for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..precision.accumulation import accumulation, decide
from ..precision.arch import detect, present
from ..precision.clips import Clips
from ..precision.guard import GuardPolicy, StageGuard
from ..precision.policy import Component
from ..precision.report import RunReport, together
from . import host
from .comfy_calls import comfy_plan
from .comfy_executors import CallLog, PerExecutor
from .comfy_products import rerun_from
from .comfy_refining import refining_guarded

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """What one guard guards."""

    model: str  # its name, for people
    component: Component
    network: torch.nn.Module
    dtype: torch.dtype  # it computes in
    device: torch.device
    attempt: Callable[..., Any]
    rerun: Callable[..., Any]
    renew: Callable[..., bool] | None = None  # has its weights loaded anew, where they may be stale


@contextmanager
def guarded_run(policy: GuardPolicy, node_id: str | None, steps: int = 0) -> Generator[Run]:
    """A run, whose report is shown on the guard's node at its end.

    steps: of the sampler; 0 where each call counts as one.
    """
    run = Run(policy, node_id, steps)
    try:
        yield run
    finally:
        run.end()


class Run:
    """Its calls may come from several threads at the same time. How far a rerun reaches (the policy's scope), each
    executor decides for itself: what another one does at that moment is chance."""

    def __init__(self, policy: GuardPolicy, node_id: str | None, steps: int):
        self._policy = policy
        self._node_id = node_id
        self._steps = steps
        self._executors = PerExecutor[_Executor]()
        self._log = CallLog()
        self._before: list[str] = []  # what had to be made again before the first call

    def refining(self, model: Any) -> Any:
        """A loaded BaseModel, whose text refiner is guarded too."""
        return refining_guarded(model, self._policy, self._refined)

    def _refined(self, line: str) -> None:
        self._before.append(line)
        host.say(self._node_id, line)

    def call(self, stage: Stage, *args: Any, **kwargs: Any) -> Any:
        executor = self._executors.of(stage.network, lambda: _executor(stage, self._policy))
        report = executor.guard.report
        with executor.switched() as report.switches:
            made = executor.guard(*args, **kwargs)
        step = self._log.add(report.steps[-1])
        if step.outcome != "finite":
            host.say(self._node_id, f"call {step.step + 1}: {step.note or step.outcome}")
        return made

    def end(self) -> None:
        """Show the report on the node, and write it to the log."""
        executors, steps = self._executors.all(), [*self._log.steps]
        if not steps:
            return
        report = together([executor.guard.report for executor in executors], steps)
        report.calls_per_step = -(-len(steps) // self._steps) if self._steps else 1
        for line in self._before:
            report.note(line)
        notes = dict.fromkeys(step.note for step in steps if step.note)
        if report.reruns and (reference := executors[0].reference):
            report.note(reference)
        if any(switch.set_by == "onediff-guard" for switch in report.switches):
            report.note(f"half-precision accumulation: {report.plan.accumulation} ({report.plan.accumulation_reason})")
        text = "\n".join((report.summary(), *list(notes)[:1], *report.notes))
        host.say(self._node_id, text)
        logger.log(logging.WARNING if notes or self._before or report.failed else logging.INFO, "NaN Guard: %s", text)


@dataclass(frozen=True)
class _Executor:
    guard: StageGuard
    switched: Callable[[], Any]  # holds the accumulation switches; bf16 and fp32 need none
    reference: str  # what a rerun computes from, where that needs a word


def _executor(stage: Stage, policy: GuardPolicy) -> _Executor:
    architecture, plan = detect(stage.device), comfy_plan(stage.component, stage.model, stage.dtype)
    switched: Callable[[], Any] = partial(nullcontext, ())
    if plan.dtype == "fp16":
        others = present()
        decision = decide(architecture, others=others)
        why = {"accumulation_reason": decision.reason_on(architecture), "accumulation_source": decision.source}
        plan = replace(plan, accumulation=decision.mode.value, **why)
        switched = partial(accumulation, architecture, others=others)
    clips = Clips(plan.dtype)
    guard = StageGuard(
        stage.component.value,
        clips.watched(stage.attempt),
        rerun=stage.rerun,
        owner=stage.network,
        dtype=plan.dtype,
        policy=policy,
        report=RunReport(stage.model, str(architecture), plan),
        tf32=architecture.tf32,
        peak_inside=clips.take,
        renew=stage.renew,
    )
    return _Executor(guard, switched, rerun_from(stage.network))
