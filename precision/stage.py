"""One stage of a run, set up: what it computes in and why, under which guard, and the report of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .arch import Architecture
from .fallback import FallbackAdapter, HalfPrecisionForward
from .guard import GuardPolicy, OnFailure, Scope, StageGuard
from .observe import Agree, alone
from .overrides import NOTHING, PrecisionOverrides
from .policy import Plan
from .report import RunReport
from .upcast import run_in_fp32


@dataclass(frozen=True)
class Stage:
    """A stage that is ready to run.

    asked: the policy that the user set; `policy` is the one that acts.
    inputs: names of the keyword arguments that carry activations.
    agree: makes what is measured the same in all processes that compute the stage together.
    """

    plan: Plan
    report: RunReport
    architecture: Architecture
    asked: GuardPolicy
    inputs: tuple[str, ...] = ()
    agree: Agree = alone

    @property
    def policy(self) -> GuardPolicy:
        """The policy that acts: a half-precision plan that is not guarded is only watched."""
        if self.plan.guarded or not self.plan.half:
            return self.asked
        return replace(self.asked, on_failure=OnFailure.OFF, scope=Scope.STEP)

    @property
    def learns(self) -> bool:
        """Whether what failed changes later calls, and what earlier runs taught is used."""
        return self.plan.half and self.policy.scope is Scope.LEARNED

    @property
    def tf32(self) -> bool:
        """Whether what is computed in fp32 for safety may use TF32's matrix products."""
        return self.architecture.tf32 and not self.policy.exact_fp32

    def in_fp32(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call such that it runs in fp32, whatever dtype its weights have."""
        return partial(run_in_fp32, call, tf32=self.tf32)

    def learner(
        self,
        network: torch.nn.Module,
        build: Callable[[PrecisionOverrides], HalfPrecisionForward],
        learned: PrecisionOverrides = NOTHING,
        blocks: Sequence[str] = (),
    ) -> FallbackAdapter:
        """Return a FallbackAdapter, which has the same arguments."""
        return FallbackAdapter(network, self.plan.dtype, build, blocks, learned, self.agree)

    def guard(
        self, network: torch.nn.Module, attempt: Callable[..., Any] | FallbackAdapter, **options: Any
    ) -> StageGuard:
        """Return the guard of the stage.

        network: the untouched original, which is also what a rerun calls.
        attempt: what to call in the plan's dtype, or a FallbackAdapter.
        options: arguments of StageGuard, in place of the stage's.
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
