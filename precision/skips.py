"""What a cached step leaves out of a denoiser: pure data, so that a family's spec costs no import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Role(Enum):
    """What a part of a denoiser does in a cached step."""

    FIRST = "first"  # it is computed in each step, and shows how a step differs from those before it
    SKIPPED = "skipped"
    LAST = "last"  # skipped too; in its place comes what is extrapolated


@dataclass(frozen=True)
class Part:
    """A part of a denoiser, by the name of its module."""

    name: str
    role: Role


@dataclass(frozen=True)
class BlocksBehindFirst:
    """A transformer's blocks, which all add to one stream: the first one is computed, and what all others add to its
    output is extrapolated."""

    blocks: str  # the ModuleList

    def parts(self, module: Any) -> list[Part]:
        """Return the parts of a denoiser in the order in which they are called; none where it has but one block."""
        names = [f"{self.blocks}.{name}" for name, _ in module.get_submodule(self.blocks).named_children()]
        if len(names) < 2:
            return []
        between = [Part(name, Role.SKIPPED) for name in names[1:-1]]
        return [Part(names[0], Role.FIRST), *between, Part(names[-1], Role.LAST)]
