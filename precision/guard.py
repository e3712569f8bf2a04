"""The guard: checks a stage's output, and reruns a failing call in fp32. `Stage` holds how a stage is set up: its plan,
its guard policy and its report.

The guard wraps one callable (a denoiser's forward, a text encoder's, a VAE's decode). In a sampling loop the scheduler
has not advanced yet when the denoiser returns, so there is nothing to roll back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..trust.message import Message, Told, shown
from .accumulation import fp16_accumulation
from .after_failure import FallbackAdapter, HalfPrecisionForward
from .arch import Architecture
from .dtypes import DTYPES
from .layer_peaks import Agree, alone, broken_weight, first_broken, floating, non_finite
from .machine import first_line
from .memory import extra_peak
from .overflow_detection import (
    KnownRangeEnds,
    PendingReads,
    Range,
    RangeEnds,
    measure_ranges,
    only_minus_inf,
    propagate_nonfinite_attention,
    range_ends,
)
from .overrides import ALL_LAYERS_SCALED, NOTHING, STAY, OverflowDiagnosis, PrecisionOverrides
from .planned_products import PlanMismatch
from .policy import Plan
from .report import PROBLEMS, Rerun, RunReport, StepRecord
from .shallow_copy import IdentityMemo
from .snapshot import Snapshot
from .upcast import run_in_fp32, tf32_off


class OnFailure(str, Enum):
    """What the guard does after a failing call. The values are saved in users' workflow files."""

    RERUN = "rerun"
    STOP = "stop"
    OFF = "off"


class Scope(str, Enum):
    """What is computed in fp32 after a failure. The values are saved in users' workflow files."""

    STEP = "step"  # only the failing call
    LEARNED = "learned"  # the failing call; from the next call on, overflow protection
    RUN = "run"  # the failing call and all calls after it


@dataclass(frozen=True)
class GuardPolicy:
    """What the guard does about a call that fails."""

    on_failure: OnFailure = OnFailure.RERUN
    exact_fp32: bool = False  # rerun in full fp32 instead of TF32 on cards that have it
    scope: Scope = Scope.LEARNED
    give_up_after: int = 3  # in scope LEARNED: failing calls after which the rest of the run is in fp32


class GuardStopped(Told, RuntimeError):
    """The guard ended the run; the message says which stage failed, how, and what to do."""

    outcome = "non-finite"  # of the failing call, as in its StepRecord


logger = logging.getLogger(__name__)

STAYS_IN_FP32 = Message("half precision is no longer used")
RENEWED = Message("values left the range of earlier steps: recomputed in fp16 with new scales")
PLAN_MISMATCH = Message("the model ran differently than in earlier steps: recomputed in fp16 with new scales")
_ERRORS_OF_A_PLAN = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError, ArithmeticError)
_NEVER_OF_A_PLAN = (torch.OutOfMemoryError, Told)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by position and by name


class _Inputs(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Call(NamedTuple):
    inputs: _Inputs
    before: Snapshot  # of all that the call may change. No closure holds it: its copies take memory of the device


class _BrokenInFp32(RuntimeError):
    """A call's output is non-finite in fp32 too, although its inputs are finite."""


@dataclass(eq=False, repr=False)
class StageGuard:
    """Stands in for a stage's callable: attempts each call, checks its output, and reruns a failing one in fp32."""

    stage: str  # its name in messages and in the report
    attempt: InitVar[Callable[..., Any] | FallbackAdapter]  # may be compiled; an adapter if LEARNED may change it
    _: KW_ONLY
    dtype: str  # "fp16", "bf16" or "fp32": the plan's of this stage
    policy: GuardPolicy
    report: RunReport  # where each call is recorded
    # The callable for fp32, the unchanged original (default: the FallbackAdapter's module, or `attempt`), and the
    # module whose weights it uses (default: the callable, or the object that it is a method of).
    rerun: Any = None
    owner: Any = None
    # Names of the keyword arguments that carry activations. They are cast to `dtype` before each attempt, since a
    # scheduler may return float32; positional tensors are too. Others (timesteps, rotary tables) keep their dtype.
    inputs: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()  # inputs that are the same tensors at every step: cast and checked once
    tf32: bool = False  # a rerun may use TF32's matrix products; with exact_fp32 it never does
    # Returns the largest |x| that the last attempt clipped. A clipped value is finite and wrong, so a value at fp16's
    # end counts as a failure.
    peak_inside: Callable[[], torch.Tensor | None] = lambda: None
    # Loads the weights again, in case those on the card are stale, and returns whether it could. Called with the
    # arguments of a call that failed in fp32 too, which is then repeated.
    renew: Callable[..., bool] | None = None
    # All-reduces measurements over the processes that compute the stage together, so that all decide alike. It runs
    # before the one transfer to the host, and does not wait for the device.
    agree: Agree = alone
    pending: PendingReads | None = None  # further numbers to read by the transfer that each call makes
    # Of a call's arguments and of `owner`: before a call is repeated, and if it raises, all changes are restored.
    snapshot: Callable[..., Snapshot] = Snapshot

    def __post_init__(self, attempt: Callable[..., Any] | FallbackAdapter) -> None:
        learner = attempt if isinstance(attempt, FallbackAdapter) else None
        self._may_learn = learner is not None and self.policy.scope is Scope.LEARNED
        self._attempt: Callable[..., Any] = learner.attempt.run if learner else attempt  # pyright: ignore[reportAttributeAccessIssue]
        made_by = learner.module if learner else self._attempt
        # a module's truth is its length, which a compiled one lacks
        self.rerun = made_by if self.rerun is None else self.rerun
        self.owner = getattr(self.rerun, "__self__", self.rerun) if self.owner is None else self.owner
        self.tf32 = self.tf32 and not self.policy.exact_fp32
        self._casts = IdentityMemo()
        self._measured = partial(measure_ranges, agree=self.agree, pending=self.pending)
        self._learner = learner or self._diagnosing_adapter()
        self._failures, self._extremes, self._finite_weights = 0, KnownRangeEnds(), False
        self._stays_in_fp32 = self._may_learn and self._learner is not None and self._learner.learned.whole_run_fp32

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage once. Returns its output, in float32 where it was rerun.

        Raises GuardStopped where an input is broken, where fp32 fails as well, or where the policy says stop.
        """
        call = self._begun(args, kwargs)
        started = time.perf_counter()
        try:
            try:
                return self._call(call)
            except _BrokenInFp32:
                self._restore(call)
                if self.renew is None or not self.renew(*args, **kwargs):
                    raise GuardStopped(self._diagnose(call.inputs)) from None
            return self._with_new_weights(args, kwargs)
        except BaseException as error:
            call.before.restore()
            if isinstance(error, GuardStopped):
                self._record(None, started, None, self.dtype, error.outcome, Range(False, None))
            raise

    def _begun(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        return _Call(_Inputs(args, kwargs), self.snapshot(args, kwargs, self.owner, self._attempt))

    def _with_new_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Repeat a call after its weights were loaded again."""
        logger.warning("%s: NaN or infinite in fp32 too, so its weights were reloaded", self._call_name())
        call = self._begun(args, kwargs)  # its buffers may have been reloaded too
        try:
            output = self._call(call)
        except _BrokenInFp32:
            self._restore(call)
            raise GuardStopped(self._diagnose(call.inputs)) from None
        last = self.report.steps[-1]
        rerun = last.outcome == "rerun"
        helped = (
            Message("and the step recomputed in fp32") if rerun else Message("after that {} was finite", last.dtype)
        )
        self.report.note(Message("NaN or infinite in fp32 too: the weights were reloaded, {}", helped))
        return output

    def _call(self, call: _Call, renewed: str = "") -> Any:
        started = time.perf_counter()
        if self._stays_in_fp32:
            output, made, timestep = self._in_fp32(call.inputs)
            return self._record(output, started, timestep, "fp32", "finite", made, note=STAYS_IN_FP32)
        casts, self._casts = self._casts, IdentityMemo()  # kept only if the call succeeds
        half_args, half_kwargs, changed = self._half_arguments(call.inputs, casts)
        failed, left, again, output = "", False, False, None
        half, inputs = self.dtype != "fp32", (half_args, half_kwargs)
        with propagate_nonfinite_attention(inputs) if half else tf32_off(self.policy.exact_fp32):
            if self._learner and self._learner.attempt.measure:
                self._learner.prepare(*half_args, **half_kwargs)
                self._attempt = self._learner.attempt.run
            try:
                with fp16_accumulation(self._learner.attempt.fp16_accumulation if self._learner else None):
                    output = self._attempt(*half_args, **half_kwargs)
            except _ERRORS_OF_A_PLAN as error:
                if self.agree is not alone or isinstance(error, _NEVER_OF_A_PLAN):
                    raise
                # learned scales may cause the error: the first step, which they were made from, did not raise it
                again = bool(self._learner and self._learner.attempt.renew())
                in_fp32 = half and self.policy.on_failure is OnFailure.RERUN
                if not (again or in_fp32) or call.before.restore():
                    raise
                left = isinstance(error, PlanMismatch)
                failed = first_line(error)  # and not the error, whose frames hold the step's tensors
        if failed and again:
            logger.info("%s: %s, recomputing with new scales", self._call_name(), failed)
            said = Message("with learned scales it raised {}: recomputed in fp16 with new scales", shown(failed, 200))
            return self._call(call, PLAN_MISMATCH if left else said)
        if failed:  # code that meets NaN or infinity may raise
            logger.warning("%s: in %s it raised %s, rerunning in fp32", self._call_name(), self.dtype, failed)
            output, made, _, rerun = self._rerun_in_fp32(call, None, to_blame=True, saturated=False, runs=False)
            note = Message("in {} it raised {}", self.dtype, shown(failed, 200))
            return self._record(output, started, None, "fp32", "rerun", made, note=note, rerun=rerun)
        at = call.inputs.kwargs.get("timestep")
        given, made, inside, timestep = self._measured(changed, output, self.peak_inside(), at)
        dtype = self.dtype if self._casts_to_half else "fp32"
        outcome, ends = made.outcome(dtype, inside), None
        if given.finite and outcome != "finite" and inside.outcome(dtype, inside) == "finite" and self.agree is alone:
            ends = range_ends(output, dtype)
            if self._extremes.known(ends) or (self.dtype == "fp32" and self._is_mask(output)):
                outcome = "finite"
        if given.finite and outcome == "finite":
            if self._learner:
                self._learner.on_success()
                if self._learner.checks_fp16_accumulation:
                    self._in_half(self._learner.check_fp16_accumulation, call, output)
                self._attempt = self._learner.attempt.run
            self._casts = casts
            return self._record(output, started, timestep, self.dtype, outcome, made, note=renewed)
        if given.finite and self._learner and self._learner.attempt.renew():
            del output
            self._restore(call)
            return self._call(call, RENEWED)
        if self.policy.on_failure is OnFailure.OFF:
            outcome = "non-finite" if outcome == "finite" else outcome
            return self._record(output, started, timestep, self.dtype, outcome, made)
        del output
        dtypes = call.before.dtypes_now()
        self._restore(call)
        outcome = "non-finite" if outcome == "finite" else outcome
        problem = PROBLEMS[outcome] if given.finite else Message("input overflow")
        self._check_rerun(outcome, call, fits=given.finite, may_be_right=ends is not None)
        logger.info("%s: %s in %s, rerunning in fp32", self._call_name(), problem, self.dtype)
        saturated = outcome == "saturated"
        output, made, finding, rerun = self._rerun_in_fp32(call, ends, to_blame=given.finite, saturated=saturated)
        call.before.cast_to_half(dtypes)
        note = Message("{} in {}", problem, self.dtype) + (Message(": {}", finding.reason) if finding else "")
        return self._record(output, started, timestep, "fp32", "rerun", made, note=note, rerun=rerun)

    def _restore(self, call: _Call) -> None:
        """Restore what a failed call changed. Raises GuardStopped if that is impossible."""
        if lost := call.before.restore():
            raise GuardStopped(
                "{}: the call in {} failed and has overwritten '{}', which was too large to copy first, so it cannot "
                "be repeated. Choose precision 'fp32' for this stage ('bf16' if the card has it), a smaller size or "
                "fewer frames.",
                self._call_name(),
                self.dtype,
                lost,
            )

    def _in_half(self, do: Callable[..., Any], call: _Call, output: Any, **how: Any) -> Any:
        """Repeat a call in half precision by `do`, if everything can be restored. Returns its result, else None."""
        with call.before.replayed(output) as possible:
            if possible:
                half_args, half_kwargs, _ = self._half_arguments(call.inputs, IdentityMemo())
                return do(*half_args, **how, **half_kwargs)
        return None

    def _check_rerun(self, outcome: str, call: _Call, *, fits: bool, may_be_right: bool) -> None:
        """Raise GuardStopped if a rerun cannot help, or if the policy says stop.

        fits: whether the input is finite in half precision.
        may_be_right: the output may be a mask, which only a rerun can show.
        """
        self._refuse_broken_input(call.inputs)
        if self.dtype == "fp32":
            raise _BrokenInFp32
        if self.policy.on_failure is OnFailure.STOP and not may_be_right:
            if fits:
                stopped = GuardStopped(
                    "{}: the output in {} is {}, and the guard is set to 'stop'. Set the NaN Guard's on_failure to "
                    "'rerun' to recompute such a step in fp32.",
                    self._call_name(),
                    self.dtype,
                    PROBLEMS[outcome],
                )
            else:
                stopped = GuardStopped(
                    "{}: its input overflows {}, and the guard is set to 'stop'. Set the NaN Guard's on_failure to "
                    "'rerun' to recompute such a step in fp32.",
                    self._call_name(),
                    self.dtype,
                )
            stopped.outcome = outcome
            raise stopped

    def _rerun_in_fp32(
        self, call: _Call, ends: RangeEnds | None, *, to_blame: bool, saturated: bool, runs: bool = True
    ) -> tuple[Any, Range, OverflowDiagnosis | None, Rerun]:
        """Rerun a call in fp32. Returns its output, the output's range, the diagnosis, and the cost.

        ends: where the output was at the end of its range. If fp32 has the same there, the output was right.
        to_blame: the stage itself failed, and not its input. runs: the half-precision call did not raise.
        """
        started, finding = time.perf_counter(), None
        learner = self._learner if to_blame and (self._may_learn or not self._failures) else None
        with extra_peak(self.owner, inputs := call.inputs) as extra_bytes:
            if learner:
                (output, made, _), finding = learner.watch(lambda: self._in_fp32(inputs))
            else:
                output, made, _ = self._in_fp32(inputs)
        if self._extremes.learn(ends, output):
            right = OverflowDiagnosis("fp32 has the same values there, so later calls accept them")
            return output, made, right, Rerun("", None, "", time.perf_counter() - started, extra_bytes())
        if self.policy.on_failure is OnFailure.STOP:
            self._check_rerun("saturated" if saturated else "non-finite", call, fits=to_blame, may_be_right=False)
        if learner and finding is None and runs:
            how = {"saturated": saturated, "peak_inside": self.peak_inside}
            finding = self._in_half(learner.locate, call, output, **how)
        action = self._adapt(finding)
        module, peak = (finding.module, finding.peak) if finding else ("", None)
        return output, made, finding, Rerun(module, peak, action, time.perf_counter() - started, extra_bytes())

    def _record(
        self, output: Any, started: float, timestep: float | None, dtype: str, outcome: str, made: Range, **more: Any
    ) -> Any:
        if self._learner and not self._stays_in_fp32:
            self.report.protection = ALL_LAYERS_SCALED if self._learner.attempt.all_layers_scaled else ""
            if slower := self._learner.attempt.slower():
                self.report.note(slower)
        seconds = time.perf_counter() - started
        record = StepRecord(self.stage, self._step, timestep, dtype, outcome, seconds, made.largest, **more)
        self.report.add(record)
        return output

    def _in_fp32(self, inputs: _Inputs) -> tuple[Any, Range, float | None]:
        """Make the call in fp32. Returns its output, the output's range and the timestep.

        Raises _BrokenInFp32 where the output is non-finite in fp32 too.
        """
        own_args, own_kwargs = self._float32_arguments(inputs)
        output = run_in_fp32(self.rerun, *own_args, tf32=self.tf32, **own_kwargs)
        _, made, _, timestep = self._measured((), output, timestep=inputs.kwargs.get("timestep"))
        if not made.finite and not self._is_mask(output):
            self._refuse_broken_input(inputs)
            raise _BrokenInFp32
        return output, made, timestep

    def _is_mask(self, output: Any) -> bool:
        """Return whether a non-finite output in fp32 may be right: it is a mask of -inf, from finite weights."""
        owner = self.owner
        if not only_minus_inf(output) or self.agree is not alone:
            return False
        self._finite_weights = (
            self._finite_weights or not isinstance(owner, torch.nn.Module) or broken_weight(owner) is None
        )
        return self._finite_weights

    def _adapt(self, finding: OverflowDiagnosis | None) -> str:
        """Adapt the next calls to a failure. Returns the change in words; "" if there is none."""
        self._failures += 1
        action = ""
        if self._may_learn and finding and self._learner:
            action = self._learner.learn(finding)
            self._attempt = self._learner.attempt.run
            self._stays_in_fp32 = self._learner.learned.whole_run_fp32
        patience = {Scope.STEP: math.inf, Scope.LEARNED: self.policy.give_up_after, Scope.RUN: 1}[self.policy.scope]
        if self._failures < patience or self._stays_in_fp32:
            return action
        self._stays_in_fp32 = True
        if self._learner:
            self._learner.stay()
        return STAY

    def _diagnosing_adapter(self) -> FallbackAdapter | None:
        """Return an adapter for a stage with a fixed attempt: it only diagnoses failures."""
        if self.dtype == "fp32" or not isinstance(self.owner, torch.nn.Module):
            return None
        attempt = HalfPrecisionForward(self._attempt, self._attempt)
        return FallbackAdapter(self.owner, self.dtype, lambda _: attempt, agree=self.agree)

    @property
    def failure_state(self) -> tuple[int, bool]:
        """The number of failures, and whether the rest of the run is in fp32: for the guard that replaces this one."""
        return self._failures, self._stays_in_fp32

    def resume_from(self, failures: int, stays: bool) -> None:
        """Continue from another guard of this run."""
        self._failures, self._stays_in_fp32 = failures, self._stays_in_fp32 or stays

    @property
    def learned(self) -> PrecisionOverrides | None:
        """What the run has learned so far; None if it may not learn."""
        return self._learner.learned if self._learner and self._may_learn else None

    @property
    def _casts_to_half(self) -> bool:
        """Whether the attempt's input and output have to fit half precision."""
        return not (self._learner and self._learner.attempt.all_layers_scaled)

    @property
    def _step(self) -> int:
        return len(self.report.steps)

    def _call_name(self) -> str:
        return Message("{}, call {}", self.stage.replace("_", " "), self._step + 1)

    def _half_arguments(
        self, inputs: _Inputs, known: IdentityMemo
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Return the arguments of an attempt, and the tensors that were cast, which have to be checked.

        known: earlier casts of constant arguments, which were checked before.
        """
        if not self._casts_to_half:
            return *self._float32_arguments(inputs), []
        target = DTYPES[self.dtype]
        changed: list[torch.Tensor] = []

        def narrowed(value: torch.Tensor) -> torch.Tensor:
            changed.append(value.to(target))
            return changed[-1]

        return *self._cast(inputs, lambda value, once: known.of(value, narrowed) if once else narrowed(value)), changed

    def _float32_arguments(self, inputs: _Inputs) -> _Arguments:
        """Return the arguments of a call in float32: a copy of each tensor that half precision would cast, so that
        neither call writes to the caller's tensors."""
        return self._cast(inputs, lambda value, _once: value.clone())

    def _cast(self, inputs: _Inputs, change: Callable[[torch.Tensor, bool], torch.Tensor]) -> _Arguments:
        """Return the arguments with `change` applied to activations that are not in the plan's dtype. `change` also
        gets whether a tensor is constant."""
        target = DTYPES[self.dtype]

        def cast(value: Any, once: bool = False) -> Any:
            fits = not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == target
            return value if fits else change(value, once)

        return tuple(map(cast, inputs.args)), {
            name: pytree.tree_map(partial(cast, once=name in self.constant), value) if name in self.inputs else value
            for name, value in inputs.kwargs.items()
        }

    def _refuse_broken_input(self, inputs: _Inputs) -> None:
        named = {f"argument {i + 1}": value for i, value in enumerate(inputs.args)}
        named |= {name: inputs.kwargs.get(name) for name in self.inputs}
        for name, value in named.items():
            broken = sum(non_finite(t) for t in floating(value))
            if broken:
                is_latents = self.stage == "denoiser" and name == next(iter(named))  # a denoiser's first argument
                before = self.report.steps[-1:] if is_latents else []
                if any(step.outcome in ("finite", "rerun") for step in before):
                    raise GuardStopped(
                        "{}: its input '{}' holds {} NaN or infinite values, made by the scheduler or sampler: the "
                        "previous call was finite. Choose another one, or another guidance scale.",
                        self._call_name(),
                        name,
                        broken,
                    )
                raise GuardStopped(
                    "{}: its input '{}' holds {} NaN or infinite values, made by the stage before it. Guard that "
                    "stage (precision 'auto', or a NaN Guard), or run it in fp32.",
                    self._call_name(),
                    name,
                    broken,
                )

    def _diagnose(self, inputs: _Inputs) -> str:
        found = Message("{}: the output is NaN or infinite in fp32 too", self._call_name())
        owner = self.owner
        if not isinstance(owner, torch.nn.Module):
            return Message("{}. Another precision does not help.", found)
        if weight := broken_weight(owner):
            return Message(
                "{}, because the weight '{}' holds {} NaN or infinite values (of {}). The checkpoint is damaged, or "
                "was cast to fp16 beyond its range: download it again, or use bf16.",
                found,
                *weight,
            )
        run = partial(run_in_fp32, self.rerun, *inputs.args, **inputs.kwargs)
        module = first_broken(owner, run, agree=self.agree) or type(owner).__name__
        return Message(
            "{}, first in '{}'. Its weights and inputs are finite. Remove nodes that change the model: their own "
            "weights may be damaged. Or try another seed or guidance scale.",
            found,
            module,
        )


@dataclass(frozen=True)
class Stage:
    """A stage that is ready to run.

    asked: the policy that the user set; `policy` is the one in effect.
    inputs: names of the keyword arguments that carry activations.
    agree: all-reduces measurements over the processes that compute the stage together.
    """

    plan: Plan
    report: RunReport
    architecture: Architecture
    asked: GuardPolicy
    inputs: tuple[str, ...] = ()
    agree: Agree = alone

    @property
    def policy(self) -> GuardPolicy:
        """The policy in effect: an unguarded half-precision plan is only watched."""
        if self.plan.guarded or not self.plan.half:
            return self.asked
        return replace(self.asked, on_failure=OnFailure.OFF, scope=Scope.STEP)

    @property
    def learns(self) -> bool:
        """Whether a failure changes later calls, and earlier runs' profiles are used."""
        return self.plan.half and self.policy.scope is Scope.LEARNED

    @property
    def tf32(self) -> bool:
        """Whether fp32 computation may use TF32's matrix products."""
        return self.architecture.tf32 and not self.policy.exact_fp32

    def in_fp32(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that it runs in fp32, whatever dtype its weights have."""
        return partial(run_in_fp32, call, tf32=self.tf32)

    def learner(
        self,
        network: torch.nn.Module,
        build: Callable[[PrecisionOverrides], HalfPrecisionForward],
        learned: PrecisionOverrides = NOTHING,
        blocks: Sequence[str] = (),
    ) -> FallbackAdapter:
        """Return a FallbackAdapter with these arguments."""
        return FallbackAdapter(network, self.plan.dtype, build, blocks, learned, self.agree)

    def guard(
        self, network: torch.nn.Module, attempt: Callable[..., Any] | FallbackAdapter, **options: Any
    ) -> StageGuard:
        """Return the guard of the stage.

        network: the unchanged original, which a rerun calls.
        attempt: the callable in the plan's dtype, or a FallbackAdapter.
        options: arguments of StageGuard that override the stage's.
        """
        given = {
            "dtype": self.plan.dtype,
            "policy": self.policy,
            "report": self.report,
            "rerun": network,
            "owner": network,
            "inputs": self.inputs,
            "tf32": self.architecture.tf32,
            "agree": self.agree,
        }
        return StageGuard(self.plan.component.value, attempt, **given | options)
