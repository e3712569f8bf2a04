"""A run that several processes compute together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..run.feature import Feature, RunContext
from .exchange import share_of
from .guidance import OverHalves
from .plan import parallel_layout
from .shell import over_ranks

if TYPE_CHECKING:
    from ..run.stage import ComponentStage


class ParallelRun(Feature):
    """Ranks share the halves of guidance, the tokens of a call, or both."""

    def __init__(self, run: RunContext):
        family, self._ranks = run.handle.family, run.handle.ranks
        splits = family.context is not None
        self._layout = parallel_layout(self._ranks.size, guided=run.guided, splits=splits)
        self._context, self._family = self._ranks.part(self._layout.context), family
        self._prompts = run.prompts
        run.report.note(str(self._layout))
        if self._layout.halves:
            run.report.calls_per_step = 1

    def prepare(self, stage: ComponentStage) -> ComponentStage:
        plan = self._family.context
        if plan is None or self._context.alone:
            return stage
        return replace(stage, adapt=partial(over_ranks, blocks=self._family.blocks[0], plan=plan, ranks=self._context))

    def wrap_denoiser(self, stage: ComponentStage, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self._layout.halves:
            return call
        return OverHalves(call, inspect.signature(stage.module.forward), self._layout, self._ranks, self._prompts)

    def own_share(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the share of a first block's input that this rank computes with."""
        plan = self._family.context
        return share_of(hidden, plan.first[plan.picture], self._context) if plan and not self._context.alone else hidden

    def of_both_halves(self, made: torch.Tensor) -> torch.Tensor:
        """Return a call's whole output, of the half that is made of it here."""
        if not self._layout.halves:
            return made
        every = self._ranks.all_gather(made)
        return torch.cat([every[rank] for rank in self._layout.first_of_halves])
