"""What a cached step leaves out of a denoiser: pure data, so that a family's spec costs no import of torch."""

from __future__ import annotations

from collections.abc import Callable
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
    """A part of a denoiser, by the name of its module.

    gives: what stands for its output where it is skipped, made of the first part's output.
    """

    name: str
    role: Role
    gives: Callable[[Any], Any] = lambda first: first


@dataclass(frozen=True)
class BlocksBehindFirst:
    """A transformer's blocks, which all add to one stream: the first one is computed, and what all others add to its
    output is extrapolated."""

    blocks: str  # the ModuleList
    adds: bool = True  # the parts add to the first one's output, and that sum is extrapolated

    def parts(self, module: Any) -> list[Part]:
        """Return the parts of a denoiser in the order in which they are called; none where it has but one block."""
        names = [f"{self.blocks}.{name}" for name, _ in module.get_submodule(self.blocks).named_children()]
        if len(names) < 2:
            return []
        between = [Part(name, Role.SKIPPED) for name in names[1:-1]]
        return [Part(names[0], Role.FIRST), *between, Part(names[-1], Role.LAST)]

    def apart(self, _module: Any, together: tuple[str, ...]) -> tuple[str, ...]:
        """Return what is compiled each for itself, of what is compiled together where nothing is cached: the same."""
        return together


@dataclass(frozen=True)
class DeepLevels:
    """A UNet's levels, as DeepCache (arXiv 2312.00858) skips them: all between the first convolution and the last layer
    of the last level are left out, and what goes into that layer is extrapolated. It gets the first convolution's
    output over the outermost skip connection, so a cached step still sees its own latents."""

    first: str = "conv_in"
    adds: bool = False

    def parts(self, module: Any) -> list[Part]:
        """Return the parts of a denoiser in the order in which they are called; none where its last level has but one
        layer."""
        *ups, last = module.up_blocks
        layers, at = len(last.resnets) - 1, f"up_blocks.{len(ups)}"
        if not layers:
            return []
        attends = len(getattr(last, "attentions", ()))
        skipped = [
            *(Part(f"down_blocks.{n}", Role.SKIPPED, _with_skips(down)) for n, down in enumerate(module.down_blocks)),
            Part("mid_block", Role.SKIPPED),
            *(Part(f"up_blocks.{n}", Role.SKIPPED) for n in range(len(ups))),
        ]
        for n in range(layers):
            skipped.append(Part(f"{at}.resnets.{n}", Role.SKIPPED))
            skipped += [Part(f"{at}.attentions.{n}", Role.SKIPPED, lambda first: (first,))] if attends else []
        *skipped, end = skipped
        return [Part(self.first, Role.FIRST), *skipped, Part(end.name, Role.LAST, end.gives)]

    def apart(self, module: Any, together: tuple[str, ...]) -> tuple[str, ...]:
        """Return what is compiled, and comes to the device, each for itself, of what does so together where nothing is
        cached: the layers of the last level do, since a cached step enters between them. In the order of the calls."""
        *ups, last = module.up_blocks
        levels = [f"up_blocks.{n}" for n in range(len(ups))]
        kinds = [kind for kind in ("resnets", "attentions") if hasattr(last, kind)]
        layers = [f"up_blocks.{len(ups)}.{kind}.{n}" for n in range(len(last.resnets)) for kind in kinds]
        return (*(name for name in together if name != "up_blocks"), *levels, *layers)


def _with_skips(down: Any) -> Callable[[Any], Any]:
    """Return what makes the output of a level on the way down: its picture, and one for each skip connection."""
    connections = len(down.resnets) + len(getattr(down, "downsamplers", None) or ())
    return lambda first: (first, (first,) * connections)
