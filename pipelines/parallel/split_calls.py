"""The feature of parallel runs: ranks share the tokens of a call, or compute both CFG halves at the same time.

A family's pipeline calls its denoiser once with both CFG halves as a batch, or once for each. Here every rank makes one
call per step, with its own half, and receives the other half's output. This is outside the guard: all ranks check their
calls together, so both halves are recomputed, or none.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...precision.policy import PlanImpossible
from ...precision.shallow_copy import IdentityMemo
from ...trust.message import Told
from ..families.spec import PROMPT
from ..run.feature import Feature, RunContext, joined, split_cfg_batch
from .exchange import share_of
from .group import ProcessGroup
from .shell import PICTURE, over_ranks

if TYPE_CHECKING:
    from ..run.stage import ComponentStage


_ATTENTION = "DIFFUSERS_ATTN_BACKEND"  # diffusers' variable for its attention kernel


@dataclass(frozen=True)
class ParallelLayout:
    """Who computes what of a step."""

    size: int  # ranks in all
    halves: bool  # one part of them computes one half of guidance, and another part the other, at the same time
    context: int  # ranks that share the tokens of a call, of neighbouring numbers

    def half(self, rank: int) -> int:
        """Return the CFG half that a rank computes, 0 or 1."""
        return rank // self.context % 2

    @property
    def first_of_halves(self) -> tuple[int, int]:
        """The lowest rank of each half."""
        return (0, self.context)

    def __str__(self) -> str:
        what, meanwhile = ("half of guidance", ", at the same time as the other") if self.halves else ("call", "")
        by = "a GPU" if self.context == 1 else f"{self.context} GPUs together"
        idle = self.size - self.context * (2 if self.halves else 1)
        return f"each {what} is computed by {by}{meanwhile}" + (f"; unused GPUs: {idle}" if idle else "")


def parallel_layout(size: int, *, guided: bool, splits: bool) -> ParallelLayout:
    """Return how ranks share the steps of a run. CFG halves come first: they exchange only outputs, while ranks that
    share tokens exchange most inputs of attention, in every block.

    size: number of ranks. guided: a step has two halves. splits: the denoiser's tokens can be shared.
    """
    halves = guided and (size % 2 == 0 or not splits)
    context = (size // 2 if halves else size) if splits else 1
    return ParallelLayout(size, halves, context)


class ParallelRun(Feature):
    """Ranks share the CFG halves, the tokens of a call, or both."""

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
        kernel = os.environ.get(_ATTENTION, "native")
        if "native" not in kernel:  # it would attend only to a rank's own tokens
            raise PlanImpossible(
                "Several GPUs can share a call only with PyTorch's attention, but {} is {}. Unset it.",
                _ATTENTION,
                kernel,
            )
        shell = partial(over_ranks, blocks=self._family.blocks[0], plan=plan, ranks=self._context)
        return replace(stage, adapt=shell, shared_by=self._context.size)

    def wrap_denoiser(self, stage: ComponentStage, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self._layout.halves:
            return call
        return OverHalves(call, inspect.signature(stage.module.forward), self._layout, self._ranks, self._prompts)

    def own_share(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the first block's input."""
        plan = self._family.context
        return share_of(hidden, plan.first[PICTURE], self._context) if plan and not self._context.alone else hidden

    def of_both_halves(self, made: torch.Tensor) -> torch.Tensor:
        """Return both CFG halves of a call's output. made: this rank's half."""
        if not self._layout.halves:
            return made
        every = self._ranks.all_gather(made)
        return torch.cat([every[rank] for rank in self._layout.first_of_halves])


class HalvesDiffer(Told, RuntimeError):
    """A pipeline calls its denoiser differently from its family's spec. The message says how."""


@dataclass(eq=False)
class OverHalves:
    """Calls of a denoiser, of which this rank computes its CFG half."""

    call: Callable[..., Any]  # takes keyword arguments
    signature: inspect.Signature  # of the denoiser
    sharing: ParallelLayout
    ranks: ProcessGroup
    prompts: Sequence[torch.Tensor]  # of both calls of a step, in order; (): both halves are one batch

    def __post_init__(self) -> None:
        self._half = self.sharing.half(self.ranks.rank)
        self._own_prompt = IdentityMemo(1)
        self._second: tuple[Mapping[str, Any], Any] | None = None  # arguments and output of this step's second call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.signature.bind(*args, **kwargs).arguments
        if self._second is not None:
            (expected, made), self._second = self._second, None
            _check(inputs, expected)
            return made
        if self.prompts:  # a step's first call computes both, which differ only in their prompts
            calls = [{**inputs, PROMPT: prompt} for prompt in self.prompts]
            _check(inputs, calls[0])
            first, second = self._both(calls[self._half])
            self._second = (calls[1], second)
            return first
        halves = split_cfg_batch(inputs)
        if len(halves) != 2:
            raise HalvesDiffer("this batch is not the two halves of guidance: run it on one GPU")
        own = halves[self._half]
        if isinstance(inputs.get(PROMPT), torch.Tensor):  # the same object in each step, as the whole prompt
            own[PROMPT] = self._own_prompt.of(inputs[PROMPT], lambda _: own[PROMPT])
        return joined(self._both(own))

    def _both(self, own: Mapping[str, Any]) -> list[Any]:
        """Call the denoiser with this rank's half, and return the outputs of both halves."""
        leaves, tree = pytree.tree_flatten(self.call(**own))
        every = [
            self.ranks.all_gather(leaf) if isinstance(leaf, torch.Tensor) else [leaf] * self.ranks.size
            for leaf in leaves
        ]
        return [pytree.tree_unflatten([each[rank] for each in every], tree) for rank in self.sharing.first_of_halves]


def _check(inputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise HalvesDiffer if a call's arguments are not the expected ones. Tensors have to be the same objects."""
    for name in {**expected, **inputs}:
        found, wanted = inputs.get(name), expected.get(name)
        if found is not wanted and (isinstance(found, torch.Tensor) or found != wanted):
            raise HalvesDiffer(
                "the calls of a step differ in '{}', not only in their prompts: run this model on one GPU",
                name,
            )
