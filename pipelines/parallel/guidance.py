"""Both halves of guidance at the same time, each by a part of the ranks.

A family's pipeline calls its denoiser once with both halves as a batch, or once for each. Here every rank makes one
call a step either way, with its own half, and gets what the other part made of the other. This stands outside of the
guard: all ranks judge their calls together, so both halves are computed again, or none.
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
from .exchange import from_each
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
        return self._of_two_calls(inputs) if self._prompts else self._of_a_batch(inputs)

    def _of_a_batch(self, inputs: Mapping[str, Any]) -> Any:
        parted = split_cfg_batch(inputs)
        if len(parted) != 2:
            raise HalvesDiffer("found a batch that has no halves, expected one of guidance: run this on one GPU")
        own = parted[self._half]
        if isinstance(inputs.get(PROMPT), torch.Tensor):  # the same object in each step, as the whole one is
            own[PROMPT] = self._own_prompt.of(inputs[PROMPT], lambda _: own[PROMPT])
        return joined(self._both(own))

    def _of_two_calls(self, inputs: Mapping[str, Any]) -> Any:
        """The first call of a step is made for both, which differ in their prompts alone."""
        if self._second is not None:
            (expected, made), self._second = self._second, None
            _check(inputs, expected)
            return made
        first, second = self._prompts
        _check(inputs, {**inputs, PROMPT: first})
        made, other = self._both({**inputs, PROMPT: self._prompts[self._half]})
        self._second = ({**inputs, PROMPT: second}, other)
        return made

    def _both(self, own: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return what the call gives for each half."""
        leaves, tree = pytree.tree_flatten(self._call(**own))
        sources = self._sharing.first_of_halves
        both = [
            from_each(leaf, sources, self._ranks) if isinstance(leaf, torch.Tensor) else [leaf] * 2 for leaf in leaves
        ]
        return tuple(pytree.tree_unflatten([pair[half] for pair in both], tree) for half in range(2))  # pyright: ignore[reportReturnType]


def _check(inputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise HalvesDiffer where a call has other arguments than it should: tensors are to be the same objects."""
    for name in {**expected, **inputs}:
        found, wanted = inputs.get(name), expected.get(name)
        if found is not wanted and (isinstance(found, torch.Tensor) or found != wanted):
            raise HalvesDiffer(
                "the calls of a step differ in '{}', and not in their prompts alone: run this model on one GPU",
                name,
            )
