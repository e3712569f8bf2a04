"""A shallow copy of a denoiser that computes with its share of the tokens, and attends with its share of the heads.

diffusers and cache-dit split by replacing `forward` on the module: a shallow copy of such a module would still call the
original's `forward`, without the scaled layers or the compiled blocks of the copy. So PyTorch's hooks split here. Every
shallow copy of this one has them too: the guard's attempt, its compiled blocks, and the rerun in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache, partial, wraps
from typing import Any

import torch

from ...precision.attention import sdpa
from ...precision.shallow_copy import add_hook, structural_copy
from ...precision.upcast import TraceableMode
from ...trust.message import Told
from ..families.spec import ContextPlan
from .exchange import gathered, heads_of_all_tokens, share_of, shares, tokens_of_all_heads
from .group import ProcessGroup

PICTURE = "hidden_states"  # every denoiser's and block's argument that carries the picture
_ATTENTION, _OUTPUT = "attn1", "proj_out"  # of a block, where tokens see each other; behind which they are put together


class TokensDiffer(Told, RuntimeError):
    """A denoiser's number of tokens differs from its family's plan. The message has both."""


class Split:
    """The ranks' shares of a call's tokens. One for each shallow copy; each call sets it, in one thread."""

    def __init__(self, ranks: ProcessGroup):
        self.ranks = ranks
        self.picture = self.text = 0  # tokens of the whole call

    @property
    def tokens(self) -> list[int]:
        """Each rank's number of tokens in attention."""
        size = self.ranks.size
        return [sum(pair) for pair in zip(shares(self.picture, size), shares(self.text, size), strict=True)]


def over_ranks(module: torch.nn.Module, blocks: str, plan: ContextPlan, ranks: ProcessGroup) -> torch.nn.Module:
    """Return a shallow copy of a denoiser that computes its calls together with the other ranks. All ranks make the
    same calls, and each gets the whole output. Weights are shared, and `module` is not changed.

    blocks: name of its list of blocks.
    """
    shell, split = structural_copy(module), Split(ranks)
    config: Any = module.config

    def count_tokens(given: dict[str, Any]) -> dict[str, Any]:
        """Store the call's number of tokens, and split arguments with one value per token."""
        split.picture = plan.tokens(config, tuple(given[PICTURE].shape))
        split.text = given[plan.text].shape[1] if plan.text else 0
        own = {name: share_of(given[name], dim, ranks) for name, dim in plan.given.items() if given[name].ndim > dim}
        return given | own

    def share_out(given: dict[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
        return given | {name: _share_of_each(given.get(name), dim, ranks) for name, dim in dims.items()}

    add_hook(shell, before=count_tokens)
    for number, block in enumerate(shell.get_submodule(blocks).children()):
        add_hook(block, before=partial(share_out, dims={**(plan.first if number == 0 else {}), **plan.every}))
        attention = block.get_submodule(_ATTENTION)
        attention.__dict__["processor"] = _attending(attention.processor, split)
    add_hook(shell.get_submodule(_OUTPUT), after=lambda made: gathered(made, 1, split.picture, ranks))
    return shell


def _share_of_each(value: Any, dim: int, ranks: ProcessGroup) -> Any:
    """Return this rank's share of a tensor, or of each tensor of a tuple; None for None."""
    if isinstance(value, (tuple, list)):
        return type(value)(share_of(part, dim, ranks) for part in value)
    return value if value is None else share_of(value, dim, ranks)


def _attending(processor: Any, split: Split) -> Any:
    """Return a copy of a diffusers attention processor that attends to the tokens of all ranks."""
    made = copy.copy(processor)
    made.__class__ = _attending_class(type(processor))
    made.split = split
    return made


@cache
def _attending_class(kind: type[Any]) -> type[Any]:
    @wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Exchanging(self.split):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Exchanging(TraceableMode):
    """A function mode in which attention is over the tokens of all ranks, with each rank's share of the heads. The rest
    of a processor computes with this rank's tokens."""

    def __init__(self, split: Split):
        super().__init__()
        self._split = split

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._attended(*args, **kwargs) if func is sdpa else func(*args, **kwargs)

    def _attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        *args: Any,
        **more: Any,
    ) -> torch.Tensor:
        """Attend: [batch, heads, this rank's tokens, channels] each → the same shape."""
        split = self._split
        if attn_mask is not None:
            raise NotImplementedError("attention over several GPUs supports no mask: run this model on one GPU")
        tokens, ranks, heads = split.tokens, split.ranks, query.shape[1]
        if query.shape[2] != tokens[ranks.rank]:
            raise TokensDiffer("found {} tokens on rank {}, expected one of {}", query.shape[2], ranks.rank, tokens)
        query, key, value = heads_of_all_tokens(torch.stack([query, key, value]), tokens, ranks).unbind()
        made = sdpa(query, key, value, None, *args, **more)
        return tokens_of_all_heads(made, tokens, heads, ranks)
