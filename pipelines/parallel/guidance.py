"""Both halves of guidance at the same time, each by a part of the ranks.

A family's pipeline calls its denoiser once with both halves as a batch, or once for each. Here every rank makes one
call a step either way, with its own half, and gets what the other part made of the other. This stands outside of the
guard: all ranks judge their calls together, so both halves are recomputed, or none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.shallow_copy import IdentityMemo
from ...trust.message import Told
from ..families.spec import PROMPT
from ..weights.cfg_batch import joined, split_cfg_batch
from .group import ProcessGroup
from .plan import ParallelLayout


class HalvesDiffer(Told, RuntimeError):
    """A pipeline calls its denoiser otherwise than its family says. The message has what was found."""


class OverHalves:
    """A denoiser's calls, of which this rank computes its half.

    call: takes a call's arguments by name.
    signature: of the denoiser.
    prompts: of both calls of a step, in their order; none where both halves are one batch.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        signature: inspect.Signature,
        sharing: ParallelLayout,
        ranks: ProcessGroup,
        prompts: Sequence[torch.Tensor] = (),
    ):
        self._call = call
        self._signature = signature
        self._sharing = sharing
        self._ranks = ranks
        self._half = sharing.half(ranks.rank)
        self._prompts = tuple(prompts)
        self._own_prompt = IdentityMemo(1)
        self._second: tuple[Mapping[str, Any], Any] | None = None  # call of this step, and what it gives

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._signature.bind(*args, **kwargs).arguments
        if self._second is not None:
            (expected, made), self._second = self._second, None
            _check(inputs, expected)
            return made
        if self._prompts:  # the first call of a step is made for both, which differ in their prompts alone
            calls = [{**inputs, PROMPT: prompt} for prompt in self._prompts]
            _check(inputs, calls[0])
            first, second = self._both(calls[self._half])
            self._second = (calls[1], second)
            return first
        halves = split_cfg_batch(inputs)
        if len(halves) != 2:
            raise HalvesDiffer("found a batch that guidance does not split in two: run this on one GPU")
        own = halves[self._half]
        if isinstance(inputs.get(PROMPT), torch.Tensor):  # the same object in each step, as the whole one is
            own[PROMPT] = self._own_prompt.of(inputs[PROMPT], lambda _: own[PROMPT])
        return joined(self._both(own))

    def _both(self, own: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return what the call gives for each half."""
        leaves, tree = pytree.tree_flatten(self._call(**own))
        every = [
            self._ranks.all_gather(leaf) if isinstance(leaf, torch.Tensor) else [leaf] * self._ranks.size
            for leaf in leaves
        ]
        first, second = self._sharing.first_of_halves
        return (
            pytree.tree_unflatten([each[first] for each in every], tree),
            pytree.tree_unflatten([each[second] for each in every], tree),
        )


def _check(inputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise HalvesDiffer where a call has other arguments than it should: tensors are to be the same objects."""
    for name in {**expected, **inputs}:
        found, wanted = inputs.get(name), expected.get(name)
        if found is not wanted and (isinstance(found, torch.Tensor) or found != wanted):
            raise HalvesDiffer(
                "the calls of a step differ in '{}', and not in their prompts alone: run this model on one GPU",
                name,
            )
