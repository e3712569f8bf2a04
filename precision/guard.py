"""The guard: check what a stage puts out, and rerun a failing call in fp32.

It wraps one callable (a denoiser's forward, a text encoder's, a VAE's decode). In a sampling loop the scheduler has
not advanced yet when the denoiser returns, so there is nothing to roll back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from .dtypes import DTYPES, FP16_MAX
from .observe import Peak, first_non_finite, floating, leaf_peaks, non_finite
from .report import RunReport, StepRecord
from .upcast import run_in_fp32

logger = logging.getLogger(__name__)


class OnFailure(str, Enum):
    """What a failing call leads to. The values stand in people's workflow files."""

    RERUN = "rerun"
    STOP = "stop"
    OFF = "off"


@dataclass(frozen=True)
class GuardPolicy:
    on_failure: OnFailure = OnFailure.RERUN
    strict: bool = False  # rerun in plain fp32 instead of TF32 on cards that have it


class GuardStopped(RuntimeError):
    """The guard ended the run; the message says which stage failed, how, and what to do."""


@dataclass(frozen=True)
class _Range:
    finite: bool
    largest: float | None  # max |x|; None where there was nothing to measure or it is not finite

    def outcome(self, dtype: str, inside: _Range) -> str:
        """inside: of what the stage computed on the way, where that is watched."""
        if not self.finite or not inside.finite:
            return "non-finite"
        if dtype == "fp16" and max(self.largest or 0, inside.largest or 0) >= FP16_MAX:
            return "saturated"
        return "finite"


class StageGuard:
    """Callable in place of a stage.

    stage: its name in messages and in the report.
    attempt: what to call; may be compiled.
    rerun: what to call in fp32 where the attempt fails; the untouched original. Defaults to `attempt`.
    owner: the module whose weights `rerun` uses. Defaults to `rerun`, or what it is a method of.
    dtype: "fp16", "bf16" or "fp32": the plan's dtype of this stage.
    inputs: names of the keyword arguments that carry activations. They are cast to `dtype` before each attempt,
        since a scheduler may hand on float32; positional tensors are cast too. Other arguments (timesteps, rotary
        tables) keep their dtype.
    peak_inside: max |x| that the last attempt reached inside, for stages that clip: a clipped value is finite, and
        wrong. Saturation counts as failure.
    explain: from the layers' peaks in fp32 to the reason of a failure; asked at the first rerun.
    """

    def __init__(
        self,
        stage: str,
        attempt: Callable[..., Any],
        *,
        dtype: str,
        policy: GuardPolicy,
        report: RunReport,
        rerun: Callable[..., Any] | None = None,
        owner: torch.nn.Module | None = None,
        inputs: tuple[str, ...] = (),
        tf32: bool = False,
        peak_inside: Callable[[], torch.Tensor | None] | None = None,
        explain: Callable[[Mapping[str, Peak]], str] | None = None,
    ):
        self.stage = stage
        self.dtype = dtype
        self.policy = policy
        self.report = report
        self._attempt = attempt
        self._rerun = rerun or attempt
        self._owner = owner or getattr(self._rerun, "__self__", self._rerun)
        self._inputs = inputs
        self._tf32 = tf32 and not policy.strict
        self._peak_inside = peak_inside or (lambda: None)
        self._explain = explain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage once. Returns its output, in float32 where it was rerun.

        Raises GuardStopped where an input is broken, where fp32 fails as well, or where the policy says stop.
        """
        started = time.perf_counter()
        half_args, half_kwargs, changed = self._cast(args, kwargs)
        output = self._attempt(*half_args, **half_kwargs)
        given, made, inside, timestep = self._measure(changed, output, self._peak_inside(), kwargs.get("timestep"))
        dtype, outcome, note = self.dtype, made.outcome(self.dtype, inside), ""
        if given.finite and outcome == "finite":
            pass
        elif self.policy.on_failure is OnFailure.OFF:
            outcome = "non-finite" if outcome == "finite" else outcome
        else:
            del output
            problem = outcome if given.finite else "its input does not fit"
            self._refuse_broken_input(args, kwargs)
            if self.dtype == "fp32":
                raise GuardStopped(self._diagnose(args, kwargs))
            if self.policy.on_failure is OnFailure.STOP:
                raise GuardStopped(
                    f"{self._where()}: the output in {self.dtype} is {problem}, and the guard is set to stop. "
                    "Set the NaN Guard's on_failure to 'rerun' to have such a step computed in fp32."
                )
            logger.info("%s: %s in %s, rerunning in fp32", self._where(), problem, self.dtype)
            output, note = self._again(args, kwargs)
            _, made, _, _ = self._measure((), output)
            if not made.finite:
                raise GuardStopped(self._diagnose(args, kwargs))
            dtype, outcome, note = "fp32", "rerun", f"{problem} in {self.dtype}{note}"
        seconds = time.perf_counter() - started
        self.report.add(StepRecord(self.stage, self._step, timestep, dtype, outcome, seconds, made.largest, note))
        return output

    @property
    def _step(self) -> int:
        return len(self.report.steps)

    def _where(self) -> str:
        return f"{self.stage.replace('_', ' ')}, call {self._step + 1}"

    def _cast(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """The arguments in the plan's dtype, and those of them that had another: a value may not have fitted."""
        target = DTYPES[self.dtype]
        changed: list[torch.Tensor] = []

        def cast(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == target:
                return value
            changed.append(value.to(target))
            return changed[-1]

        half_args = tuple(map(cast, args))
        half_kwargs = {name: cast(value) if name in self._inputs else value for name, value in kwargs.items()}
        return half_args, half_kwargs, changed

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """The call in fp32, and why it had to be, once a run."""

        def rerun() -> Any:
            return run_in_fp32(self._rerun, *args, tf32=self._tf32, **kwargs)

        explain, self._explain = self._explain, None
        if explain is None or not isinstance(self._rerun, torch.nn.Module):
            return rerun(), ""
        outputs: list[Any] = []
        peaks = leaf_peaks(self._rerun, lambda: outputs.append(rerun()))
        reason = explain(peaks)
        logger.info("%s: %s", self._where(), reason)
        return outputs[0], f": {reason}"

    def _measure(
        self, given: Any, made: Any, inside: torch.Tensor | None = None, timestep: Any = None
    ) -> tuple[_Range, _Range, _Range, float | None]:
        """Ranges of some inputs, of the output and inside, and the timestep: one transfer to the host for all."""
        given, made = floating(given), floating(made)
        values = [bound.float() for tensor in (*given, *made) for bound in torch.aminmax(tensor.detach())]
        inside_at = len(values)
        if inside is not None:
            values.append(inside)
        if isinstance(timestep, torch.Tensor) and timestep.numel():
            values.append(timestep.detach().reshape(-1)[0].float())
        else:
            timestep = None
        numbers = torch.stack([value.to(values[0].device) for value in values]).tolist() if values else []
        bounds, rest = numbers[:inside_at], numbers[inside_at:]
        return (
            _range_of(bounds[: 2 * len(given)]),
            _range_of(bounds[2 * len(given) :]),
            _range_of(rest[:1] if inside is not None else []),
            rest[-1] if timestep is not None else None,
        )

    def _refuse_broken_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {f"argument {i + 1}": v for i, v in enumerate(args)} | {n: kwargs.get(n) for n in self._inputs}
        for name, value in named.items():
            broken = sum(non_finite(t) for t in floating(value))
            if broken:
                raise GuardStopped(
                    f"{self._where()}: its input '{name}' holds {broken} non-finite values already, so the stage "
                    "before it made them. Run that stage guarded (precision 'auto' or 'fp16'), or in 'fp32'."
                )

    def _diagnose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        found = f"{self._where()}: the output is non-finite in fp32 too"
        owner = self._owner
        if not isinstance(owner, torch.nn.Module):
            return f"{found}. Precision cannot help here."
        for name, weight in (*owner.named_parameters(), *owner.named_buffers()):
            broken = non_finite(weight) if weight.is_floating_point() else 0
            if broken:
                return (
                    f"{found}, because the weight '{name}' holds {broken} non-finite values of {weight.numel()}. "
                    "The checkpoint is damaged (or was stored in fp16 beyond its range): download it again."
                )
        module = first_non_finite(owner, lambda: run_in_fp32(self._rerun, *args, **kwargs))
        return f"{found}, first in '{module}'. Its weights and inputs are finite: try another seed or guidance scale."


def _range_of(bounds: list[float]) -> _Range:
    if not bounds:
        return _Range(True, None)
    if all(abs(bound) < float("inf") for bound in bounds):  # false for NaN too
        return _Range(True, max(map(abs, bounds)))
    return _Range(False, None)
