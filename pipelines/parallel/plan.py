"""What a family says of its denoiser's tokens, for ranks to share its calls."""

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
