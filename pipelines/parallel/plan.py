"""How ranks share a denoiser's calls: what a family says of its tokens, and what follows for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# (denoiser config, shape of its `hidden_states`) → tokens that the blocks have of them
Tokens = Callable[[Mapping[str, Any], tuple[int, ...]], int]


@dataclass(frozen=True)
class ContextPlan:
    """Where tokens are split, and where they come together.

    Between, each rank has its share of the tokens. All that is not attention treats tokens apart, and needs no other
    rank.

    tokens: of the picture or video.
    first: arguments of the first block whose tokens are split, and the dimension that they are in. It hands on what is
        split, so that the other blocks get it so.
    every: the same of each block, for what is handed to all of them whole.
    given: the same of the denoiser itself, for what has a token's timestep each; left alone where it has one dimension.
    attention: of a block, where tokens see each other.
    output: the layer behind whose output the tokens are put together.
    """

    tokens: Tokens
    first: Mapping[str, int]
    every: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, int] = field(default_factory=dict)
    attention: str = "attn1"
    output: str = "proj_out"
    picture: str = "hidden_states"  # the argument of blocks and denoiser that carries the picture
    text: str = ""  # the one that carries text, where that is split too


@dataclass(frozen=True)
class ParallelLayout:
    """Who computes what of a step.

    size: ranks in all.
    halves: one part of them computes one half of guidance, and another part the other, at the same time.
    context: ranks that share the tokens of a call, of neighbouring numbers.
    """

    size: int = 1
    halves: bool = False
    context: int = 1

    def half(self, rank: int) -> int:
        """Return which half of guidance a rank computes, 0 or 1."""
        return rank // self.context % 2

    @property
    def first_of_halves(self) -> tuple[int, int]:
        """The rank of the lowest number in each half."""
        return (0, self.context)

    def __str__(self) -> str:
        if self.size == 1:
            return ""
        what, meanwhile = ("half of guidance", ", at the same time as the other") if self.halves else ("call", "")
        by = "a GPU" if self.context == 1 else f"{self.context} GPUs together"
        idle = self.size - self.context * (2 if self.halves else 1)
        return f"each {what} is computed by {by}{meanwhile}" + (f"; GPUs that gain nothing: {idle}" if idle else "")


def parallel_layout(size: int, *, guided: bool, splits: bool) -> ParallelLayout:
    """Return how ranks share the steps of a run. Halves of guidance come first: they see nothing of each other until
    both are done, while ranks that share tokens send each other most of what attention takes, in every block.

    size: ranks in all. guided: a step has two halves. splits: the denoiser's tokens can be shared.
    """
    halves = guided and size > 1 and (size % 2 == 0 or not splits)
    context = (size // 2 if halves else size) if splits else 1
    return ParallelLayout(size, halves, context)
