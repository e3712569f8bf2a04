"""Whether a plan's linear layers can accumulate in fp16 here."""

from __future__ import annotations

from ...precision.accumulation import has_fp16_sums
from ...precision.policy import Plan, PlanImpossible


def check_sums(plan: Plan) -> None:
    """Raise PlanImpossible where a plan needs a switch that this PyTorch lacks."""
    if missing := lacking_for(plan):
        raise PlanImpossible(missing)


def lacking_for(plan: Plan) -> str:
    """Say what a plan's linear layers lack here to accumulate in fp16, and what to do; "" where nothing is lacking."""
    if not plan.fp16_sums or has_fp16_sums():
        return ""
    import torch

    return (
        "Accumulation 'fp16' needs PyTorch 2.7 or newer, whose matrix products can accumulate in fp16, and this is "
        f"{torch.__version__}. Choose accumulation 'auto', or update PyTorch."
    )
