"""One run of ComfyUI's own MODEL or VAE under the guard: a guard for each executor, and one report for all of them."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..precision.accumulation import accumulation
from ..precision.after_failure import HalfPrecisionForward
from ..precision.arch import present
from ..precision.dtypes import DTYPES, dtype_name
from ..precision.guard import GuardPolicy, GuardStopped, Scope, StageGuard
from ..precision.learned_scales import LearnedProducts
from ..precision.machine import first_line
from ..precision.overflow_detection import ClipDetector
from ..precision.overrides import NOTHING, PrecisionOverrides, Profile, ProfileFile
from ..precision.policy import Precision
from ..precision.report import PROBLEMS, RunReport, StepRecord, together
from ..precision.upcast import RerunUnsupported
from ..trust.message import BadInput, Message, Told, joined, message_of, shown
from . import host
from .compat import what_changed
from .language import speaking, translated
from .native_network import ComfyNetwork, profile_of
from .refining import forget_earlier_runs, refining_guarded
from .rerun_layers import OwnProducts, rerun_from

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings of a guard's node, and the precision overrides of its runs, by profile, for later runs."""

    policy: GuardPolicy
    request: Precision | None = None  # None: ComfyUI's choice
    node_id: str | None = None
    profile: Profile | None = None  # in place of the stored one
    learned: MutableMapping[str, PrecisionOverrides] = field(default_factory=dict)
    inserted: bool = False  # by 'Guard every workflow': it never ends a run, and is silent unless something happened


@contextmanager
def guarded_run(settings: Settings, steps: int = 0) -> Generator[Run]:
    """Yield a run, and show its report on the guard's node at the end.

    steps: the sampler's number of steps; 0 if each call counts as one.
    """
    run = Run(settings, steps)
    ended_by: BaseException | None = None
    try:
        with speaking(), run.until_end:
            yield run
    except BaseException as error:
        run.ended_by(ended_by := error)
        raise
    finally:
        try:
            run.end()
        except Exception as error:
            if not (settings.inserted or ended_by or what_changed(error)):  # the error that ended the run counts
                raise
            logger.exception("NaN Guard: the report of this run failed")
        for of_controlnet in run._controlnets:
            of_controlnet._executors.clear()  # a reference cycle would keep its network


class Run:
    """One run. Its calls may come from several threads at the same time. Each executor applies the policy's scope by
    itself, since the timing of the others is random."""

    def __init__(self, settings: Settings, steps: int, node: tuple[str | None, str] | None = None):
        self._settings = settings
        node = node or (host.executing_node() if settings.inserted else (settings.node_id, ""))
        self._node_id, self._node_type = node
        self._steps = steps
        self._executors: dict[tuple[torch.nn.Module, int], _Executor] = {}  # by network and thread
        self._calls: list[StepRecord] = []  # of all executors, in the order in which they ended
        self._lock = threading.Lock()
        self._models: list[Any] = []  # whose caches of earlier runs are cleared
        self._replaced = False  # whether an executor was replaced by one that computes as ComfyUI does
        self._before: list[str] = []  # the report's first lines
        self._given_up: str = ""  # why the rest of the run is not guarded
        self._controlnets: list[Run] = []
        self.until_end = ExitStack()
        self._stopped: StepRecord | None = None  # the latest call that a guard has ended
        self._ended_by: str = ""  # what ended the run early
        self.retried = False  # whether ComfyUI repeats the call tiled if it runs out of memory

    def meet(self, model: Any) -> None:
        """Clear a BaseModel's caches of earlier runs, before its first call."""
        with self._lock:
            known = any(each is model for each in self._models)
            self._models += [] if known else [model]
        if not known:
            forget_earlier_runs(model)

    def forget(self) -> None:
        """Clear the models' caches if calls computed differently from ComfyUI: later calls would read the results."""
        if self._replaced or any(executor.own_way for executor in self._executors.values()):
            for model in self._models:
                forget_earlier_runs(model)

    def unguarded(self, plain: Callable[[], Any]) -> Any:
        """Compute without the guard, since a rerun has no gradient; the report says so."""
        self.note(Message("Not guarded: calls through which a node computes a gradient"))
        return plain()

    def note(self, line: str) -> None:
        """Add a line to the report, once."""
        with self._lock:
            self._before += [] if line in self._before else [line]

    def saw_no_call(self) -> None:
        """Note that ComfyUI called no model in a sampling. DeepCache, for example, calls a network's parts itself."""
        said = Message("Not guarded: ComfyUI did not call this model; another node may run it directly")
        with self._lock:
            self._given_up = self._given_up or said

    def of_controlnet(self) -> Run:
        """Return a new run for a ControlNet, whose report becomes part of this run's report."""
        asked = self._settings.request
        request = None if asked is Precision.FP16_PLAIN else asked  # fp16 (plain) is valid only if ComfyUI chose fp16
        settings = replace(self._settings, learned={}, profile=None, request=request)
        made = Run(settings, 0, (self._node_id, self._node_type))
        self._controlnets.append(made)
        return made

    @property
    def latest(self) -> StepRecord:
        """The call that ended last."""
        return self._calls[-1]

    def refining(self, model: Any) -> Any:
        """Return a view of a loaded BaseModel whose text refiner is guarded too."""
        policy = self._settings.policy
        return self.or_plain(lambda: refining_guarded(model, policy, self._refined, self.or_plain), lambda: model)

    def _refined(self, line: str) -> None:
        self._before.append(line)
        self._say(line)

    def _say(self, line: str) -> None:
        if not self._settings.inserted:  # else the node is another pack's
            host.say(self._node_id, line)

    def or_plain(
        self, guarded: Callable[[], Any], plain: Callable[[], Any], broken: Callable[[], Any] | None = None
    ) -> Any:
        """Return `guarded()`. If an inserted guard fails, or any guard finds that ComfyUI has changed, return
        `plain()`, in this call and in the rest of the run: the run then fails only if it fails without us.

        broken: called in place of `plain` if state that the failed call has overwritten could not be restored.
        """
        if self._given_up:
            return plain()
        try:
            return guarded()
        except Exception as error:
            changed = what_changed(error)
            if not (self._settings.inserted or changed) or host.is_interrupt(error):
                raise
            if self.retried and isinstance(error, torch.OutOfMemoryError):
                self.retried = False
                raise
            why, details = changed or _why(error), "".join(traceback.format_exception(error))  # it holds no tensors
            plain = broken if broken and getattr(error, "lost", "") else plain
        self.forget()
        made = plain()
        with self._lock:
            self._given_up = Message("Not guarded from call {} on: {}", self._at(), why)
        logger.warning("NaN Guard: %s", self._given_up)
        logger.debug("%s", details)
        return made

    def call(self, of: ComfyNetwork, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(of, *args, **kwargs)
        except GuardStopped:
            last = self._executor(of).guard.report.steps[-1]
            with self._lock:  # a sampler may catch it, and go on
                self._stopped = replace(last, step=len(self._calls))
                self._calls.append(self._stopped)
            raise

    def _call(self, of: ComfyNetwork, *args: Any, **kwargs: Any) -> Any:
        executor = self._executor(of)
        try:
            made = executor(*args, **kwargs)
        except _CannotProtect as error:
            policy = self._settings.policy
            scope = Scope.STEP if policy.scope is Scope.LEARNED else policy.scope
            plain = replace(self._settings, request=None, policy=replace(policy, scope=scope))
            executor = self._executor(of, plain)
            executor.guard.report.note(
                Message("computed as ComfyUI does, since not every layer can be protected: {}", error)
            )
            made = executor(*args, **kwargs)
        if executor.profile and (learned := executor.guard.learned):
            self._settings.learned[executor.profile.here.name] = replace(learned, whole_run_fp32=False)
        with self._lock:
            step = replace(executor.guard.report.steps[-1], step=len(self._calls))
            self._calls.append(step)
        if step.outcome != "finite":
            self._say(Message("call {}: {}", step.step + 1, _what_happened(step)))
        return made

    def _executor(self, of: ComfyNetwork, settings: Settings | None = None) -> _Executor:
        """Return this thread's executor for a network. settings: to replace it by one with these settings."""
        key = of.network, threading.get_ident()
        with self._lock:
            self._replaced |= settings is not None
            if settings or key not in self._executors:
                self._executors[key] = _executor(of, settings or self._settings)
            return self._executors[key]

    def _at(self) -> int:
        """Return the number of the current call, from 1. A call that a guard has stopped is counted already."""
        return len(self._calls) + (not (self._calls and self._calls[-1] is self._stopped))

    def ended_by(self, error: BaseException) -> None:
        """Note for the report how the run ended early."""
        with self._lock:
            done = len(self._calls)
            if isinstance(error, GuardStopped):
                self._ended_by = Message("ended by the NaN Guard at call {}", self._at())
            elif host.is_interrupt(error) or not isinstance(error, Exception):
                self._ended_by = Message("stopped after call {}", done) if done else Message("stopped at call 1")
            else:
                after = Message("ended by an error after call {}", done)
                self._ended_by = after if done else Message("ended by an error at call 1")
        for of_controlnet in self._controlnets:
            if of_controlnet._stopped:
                of_controlnet.ended_by(error)

    def end(self, given_up: str = "") -> None:
        """Show the report on the node, and write it to the log. given_up: why there was no guard."""
        with self._lock:
            self._given_up = self._given_up or given_up
        report = self._report()
        if report is None:
            if self._is_eventful():
                text = joined("\n", filter(None, (*self._before, *self._of_controlnets(), self._given_up)))
                self._say(text)
                self._tell(text)
            return
        notes = dict.fromkeys(_what_happened(step) for step in report.steps if step.note)
        text = joined("\n", (report.summary(), *list(notes)[:1], *report.notes))
        self._say(text)
        self._tell(text, report.as_dict(), eventful=self._is_eventful())

    def _is_eventful(self) -> bool:
        happened = self._before or self._given_up or any(step.note or step.outcome in PROBLEMS for step in self._calls)
        return bool(happened) or any(each._is_eventful() for each in self._controlnets)

    def _report(self) -> RunReport | None:
        """Return the report of the run's calls; None if there is nothing to report."""
        with self._lock:
            executors, steps = [*self._executors.values()], [*self._calls]
        if not steps and not (executors and self._ended_by):
            return None
        for executor in executors:
            executor.keep()
        report = together([executor.guard.report for executor in executors], steps)
        report.ended_by = self._ended_by
        per_step = -(-len(steps) // (self._steps or len(steps) or 1)) or 1
        fits = -(-len(steps) // per_step) == self._steps  # the last step may make fewer calls than the others
        report.in_calls = bool(self._steps) and (not fits or bool(self._ended_by))
        report.calls_per_step = 1 if report.in_calls else per_step
        for line in self._before:
            report.note(line)
        for executor in executors:
            if executor.guard.report.reruns and executor.reference:
                report.note(executor.reference)
        if (report.reruns or any(executor.own_way for executor in executors)) and host.plans_memory():
            report.note(
                Message("Comfy Compiler plans no memory for recomputed or protected steps: they need extra memory")
            )
        for layout, why in (pair for executor in executors for pair in executor.quantised.without.items()):
            report.note(Message("{} weights are dequantised in each step (slower): {}", layout, why))
        if any(switch.set_by == "onediff-guard" for switch in report.switches):
            plan = report.plan
            report.note(Message("half-precision accumulation: {} ({})", plan.accumulation, plan.accumulation_reason))
        for line in self._of_controlnets(report.notes):
            report.note(line)
        if self._given_up:
            report.note(self._given_up)
        return report

    def _of_controlnets(self, said: Sequence[str] = ()) -> list[Message]:
        """Return the ControlNets' report lines. said: lines to leave out."""
        lines: list[str] = []
        for each in self._controlnets:
            if report := each._report():
                report.in_calls = True  # it may run in some of the steps only
                lines += (report.summary(), *report.notes)
            else:
                lines.append(each._given_up)
        return [Message("ControlNet: {}", line) for line in lines if line and line not in said]

    def _tell(self, text: str, *reports: Any, eventful: bool = True) -> None:
        if eventful or not self._settings.inserted:
            output = {"text": [translated(text)], "onediff_guard": [*reports]}
            if self._given_up:
                output["unguarded"] = [translated(self._given_up)]
            host.send_report(self._node_id, output, self._node_type)
        if self._settings.inserted:
            host.note_in_history(text)
        logger.log(logging.WARNING if eventful else logging.INFO, "NaN Guard: %s", text)


def _why(error: Exception) -> str:
    if isinstance(error, (GuardStopped, BadInput)):
        return message_of(error)
    return shown(first_line(error), 300)


def _what_happened(step: StepRecord) -> str:
    action = step.rerun.action if step.rerun else ""
    return joined("; ", filter(None, (step.note or PROBLEMS[step.outcome], action)))


class _CannotProtect(Told, TypeError):
    """A part of the network cannot run with every layer scaled; the message names it."""


@dataclass(frozen=True)
class _Executor:
    guard: StageGuard
    switched: Callable[[], Any]  # sets the accumulation switches inside; bf16 and fp32 need none
    reference: str  # what a rerun computes from, for the report; "" if it needs no mention
    quantised: OwnProducts
    own_way: list[bool]  # not empty once calls compute differently from ComfyUI
    began: PrecisionOverrides  # its overrides at the start
    profile: ProfileFile | None  # None if the stage learns nothing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.switched() as self.guard.report.switches:
            return self.guard(*args, **kwargs)

    def keep(self) -> None:
        """Save new precision overrides for later runs, also of other processes."""
        if self.profile and self.guard.learned and self.guard.learned.to_share != self.began.to_share:
            self.profile.save(self.guard.learned)


def _executor(of: ComfyNetwork, settings: Settings) -> _Executor:
    stage = of.stage(settings.policy, settings.request)
    plan, report = stage.plan, stage.report
    in_fp16 = plan.dtype == "fp16"
    switched = partial(accumulation, stage.architecture, others=present()) if in_fp16 else partial(nullcontext, ())
    clips, quantised = ClipDetector(plan.dtype, of.calls_others), OwnProducts()
    products = LearnedProducts(DTYPES[plan.dtype], kernel_of=quantised.kernel_of)

    def in_half(*args: Any, **kwargs: Any) -> Any:
        try:
            return products.run(of.in_full, *args, tf32=stage.tf32, **kwargs)
        except RerunUnsupported as error:
            raise _CannotProtect(message_of(error)) from error

    own_way: list[bool] = []

    def build(learned: PrecisionOverrides) -> HalfPrecisionForward:
        scaled = plan.half and (plan.overflow_protection or learned.all_layers_scaled)
        if not scaled and plan.dtype == dtype_name(of.dtype):
            attempt = clips.wrap(of.attempt)
        else:
            attempt = in_half if plan.half else stage.in_fp32(of.in_full)
            own_way.append(True)
        how: dict[str, Any] = {"renew": products.renew, "slower": lambda: products.slower}
        return HalfPrecisionForward(attempt, attempt, all_layers_scaled=scaled, **how)

    learned, profile = NOTHING, None
    if stage.learns:
        own = profile_of(of, stage.architecture, plan.dtype)
        profile = ProfileFile(own, host.profiles_directory(), settings.profile)
        if (key := own.name) not in settings.learned:
            settings.learned[key], notes = profile.load()
            for line in notes:
                report.note(line)
        learned = settings.learned[key]
    learner = stage.learner(of.network, build, learned)

    def peak_inside() -> torch.Tensor | None:
        return None if learner.attempt.all_layers_scaled else clips.take()

    how = {"rerun": of.rerun, "renew": of.renew, "peak_inside": peak_inside, "snapshot": of.snapshot}
    guard = stage.guard(of.network, learner, **how)
    return _Executor(guard, switched, rerun_from(of.network), quantised, own_way, learned, profile)
