"""What was found of runs on a card of so many bytes, without running them."""

from __future__ import annotations

from dataclasses import dataclass

OTHERS = 800_000_000  # bytes of a card that its driver, a desktop and CUDA's context take

Size = tuple[int, int, int]  # width, height, frames


@dataclass(frozen=True)
class StageOnPaper:
    """One stage, as it would run. Sizes are in bytes."""

    stage: str
    dtype: str
    way: str  # "none", "group", "tiling", ...
    weights: int  # on the card at once
    beside: int
    fits: bool
    fastest: int  # what the fastest way would take


@dataclass(frozen=True)
class RunOnPaper:
    """One model's run on a card of `memory` bytes, of which `has` are for it."""

    variant: str
    size: Size
    memory: int
    has: int
    stages: tuple[StageOnPaper, ...]
