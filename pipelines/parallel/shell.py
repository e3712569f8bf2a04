"""A shell of a denoiser that computes with its share of the tokens, and attends with its share of the heads.

diffusers and cache-dit split by hooks, which replace `forward` on the module that they are put on: a shell of such a
module would go on calling the original's, without the wide layers, the islands or the compiled blocks that it is made
for. So what splits here is a class before the module's own, as for wide layers. Every shell of this shell has it, and
so do the guard's attempt, what is compiled of it, and the rerun in fp32.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch

from ...precision.attention import sdpa
from ...precision.shallow_copy import structural_copy
from ...precision.upcast import Mode
from ...trust.message import Told
from .exchange import gathered, heads_of_all_tokens, share_of, shares, tokens_of_all_heads
from .group import ProcessGroup
from .plan import ContextPlan


class TokensDiffer(Told, RuntimeError):
    """A denoiser has another number of tokens than its family says. The message has both."""


class Split:
    """How much of a call's tokens each rank has. One for each shell; set anew by each call, in one thread."""

    def __init__(self, ranks: ProcessGroup):
        self.ranks = ranks
        self.picture = self.text = 0  # tokens of the whole call

    @property
    def tokens(self) -> list[int]:
        """How many tokens each rank has in attention."""
        size = self.ranks.size
        return [sum(pair) for pair in zip(shares(self.picture, size), shares(self.text, size), strict=True)]


def over_ranks(module: torch.nn.Module, blocks: str, plan: ContextPlan, ranks: ProcessGroup) -> torch.nn.Module:
    """Return a shell of a denoiser that computes its calls together with the other ranks'. All of them make the same
    calls, and each gets the whole output. Weights are shared, and `module` is not touched.

    blocks: the name of its list of blocks.
    """
    shell, split = structural_copy(module), Split(ranks)
    _become(shell, _Denoiser, context=plan, split=split)
    for number, block in enumerate(shell.get_submodule(blocks).children()):
        _become(block, _Block, split=split, dims={**(plan.first if number == 0 else {}), **plan.every})
        attention = block.get_submodule(plan.attention)
        attention.__dict__["processor"] = _attending(attention.processor, split)
    _become(shell.get_submodule(plan.output), _Output, split=split)
    return shell


class _Over(torch.nn.Module):
    """A base before the class of a module that is split."""

    split: Split


class _Denoiser(_Over):
    config: Any  # a diffusers model's
    context: ContextPlan

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        """Note how many tokens the call has, and split what has one value for each."""
        plan, split = self.context, self.split
        split.picture = plan.tokens(self.config, tuple(given[plan.picture].shape))
        split.text = given[plan.text].shape[1] if plan.text else 0
        for name, dim in plan.given.items():
            if given[name].ndim > dim:
                given[name] = share_of(given[name], dim, split.ranks)
        return given


class _Block(_Over):
    dims: Mapping[str, int]

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        ranks = self.split.ranks
        for name, dim in self.dims.items():
            given[name] = _each(given.get(name), lambda tensor, dim=dim: share_of(tensor, dim, ranks))
        return given


class _Output(_Over):
    def after(self, made: torch.Tensor) -> torch.Tensor:
        """[batch, this rank's tokens, channels] → [batch, tokens, channels]."""
        return gathered(made, 1, self.split.picture, self.split.ranks)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tensor changed, or a tuple of them, each changed; None stays."""
    if isinstance(value, (tuple, list)):
        return type(value)(change(part) for part in value)
    return value if value is None else change(value)


def _become(shell: torch.nn.Module, base: type[Any], **state: Any) -> None:
    """Make a shell a `base` as well, with `state` as its attributes."""
    shell.__class__ = _joined(base, type(shell))
    shell.__dict__.update(state)


@cache
def _joined(base: type[Any], kind: type[Any]) -> type[Any]:
    """Return a class that derives from `base`, then `kind`, and has the names and the signature of `kind`."""
    signature = inspect.signature(kind.forward)
    names = [*signature.parameters][1:]

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(base, "before"):
            return self.after(kind.forward(self, *args, **kwargs))
        return kind.forward(self, **self.before(dict(zip(names, args, strict=False)) | kwargs))

    return type(
        kind.__name__,
        (base, kind),
        {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def _attending(processor: Any, split: Split) -> Any:
    """Return a copy of diffusers' processor of an attention layer whose attention is over the tokens of all ranks."""
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


class _Exchanging(Mode):
    """A function mode in which attention is over the tokens of all ranks, by a share of the heads each. Whatever a
    processor does before and behind it, it does with its own tokens."""

    def __init__(self, split: Split):
        super().__init__()
        self._split = split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo cannot follow from here
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        if func is sdpa:
            return self._attended(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        *args: Any,
        **more: Any,
    ) -> torch.Tensor:
        """[batch, heads, this rank's tokens, channels] each → the same."""
        split = self._split
        if attn_mask is not None:
            raise NotImplementedError("attention over several GPUs takes no mask: run this model on one GPU")
        tokens, ranks, heads = split.tokens, split.ranks, query.shape[1]
        if query.shape[2] != tokens[ranks.rank]:
            raise TokensDiffer("found {} tokens on rank {}, expected one of {}", query.shape[2], ranks.rank, tokens)
        query, key, value = heads_of_all_tokens(torch.stack([query, key, value]), tokens, ranks).unbind()
        made = sdpa(query, key, value, None, *args, **more)
        return tokens_of_all_heads(made, tokens, heads, ranks)
