"""Whether a plan's linear layers can accumulate in fp16 here."""

from __future__ import annotations

from ...precision.accumulation import has_fp16_sums
from ...precision.policy import Plan, PlanImpossible
from ...trust.message import Message


def check_sums(plan: Plan) -> None:
    """Raise PlanImpossible where a plan needs a switch that this PyTorch lacks."""
    if lacks_sums(plan):
        raise PlanImpossible(missing())


def lacks_sums(plan: Plan) -> bool:
    return plan.fp16_sums and not has_fp16_sums()


def missing() -> str:
    """Say what is lacking, and what to do."""
    import torch

    return Message(
        "Accumulation 'fp16' needs PyTorch 2.7 or newer, whose matrix products can accumulate in fp16, and this is "
        "{}. Choose accumulation 'auto', or update PyTorch.",
        torch.__version__,
    )
