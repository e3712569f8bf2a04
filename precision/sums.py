"""Which linear layers accumulate in fp16: decided from how far each is off by it, and how far a whole step is.

A product that accumulates in fp16 rounds each partial sum to 11 bits, and a partial sum may be infinite where the
result is not. How much of that reaches the result nobody can tell from a layer alone, so a step is made with the layers
that are to accumulate in fp16, and compared. Where that is too far off, parts of them are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..trust.message import Message, joined

# Of a step's output, as a share of its norm, against the same step with sums in fp32. Half of what bf16 comes to on the
# networks of docs/quantised.md (0.007 to 0.014), which models are run in without a thought.
BUDGET = 0.005
LAYER = 0.02  # the same of one layer's output: beyond, what it adds up cancels, and another step may be far worse
ROWS = 64  # that a layer is given in a call at the least: with fewer, a card waits for its weights, not for products
LOST = 0.1  # of the layers, that may be left out without looking closer at which of them matter
TRIALS = 16  # steps that are made at the most to find layers within the budget; where all are within it, one is


@dataclass(frozen=True)
class LayerError:
    """How far a layer's output is off where it accumulates in fp16."""

    name: str
    error: float  # as a share of its norm; inf where it is not finite, and accumulated in fp32 it is
    rows: int  # that it was given at once


@dataclass(frozen=True)
class Sums:
    """What the linear layers of a network accumulate in, as one step showed."""

    layers: tuple[str, ...] = ()  # in fp16
    islands: tuple[str, ...] = ()  # in fp32, in which their neighbours do not
    overflows: tuple[str, ...] = ()  # of these: not finite in fp16
    largest: float = 0.0  # the largest finite error of a layer
    farthest: str = ""  # the layer that has it
    step: float = 0.0  # the error of a step with them

    def without(self, layer: str) -> Sums:
        """Return the same with one more layer in fp32, which was not finite."""
        layers = tuple(name for name in self.layers if name != layer)
        return Sums(layers, (*self.islands, layer), (*self.overflows, layer), self.largest, self.farthest, self.step)

    def __str__(self) -> str:
        measured = len(self.layers) + len(self.islands)
        if not measured:
            return Message("nothing: no linear layer is large enough to gain by it")
        said = [
            Message("{} of {} linear layers, by which a step is off by {:.2%}", len(self.layers), measured, self.step)
        ]
        if not self.layers:
            said = [Message("none of {} linear layers: a step would be off by more than {:.1%}", measured, BUDGET)]
        if self.farthest:
            said.append(Message("the farthest is '{}', off by {:.2%}", self.farthest, self.largest))
        if self.islands:
            said.append(Message("in fp32: {}", _named(self.islands)))
        if self.overflows:
            said.append(Message("not finite in fp16: {}", _named(self.overflows)))
        return joined("; ", said)


def settled(measured: Sequence[LayerError], step_error: Callable[[tuple[str, ...]], float]) -> Sums:
    """Return what the layers accumulate in, so that a step is within the budget.

    step_error: makes a step in which these layers accumulate in fp16, and returns how far its output is off.
    """
    able = [layer for layer in measured if layer.rows >= ROWS]
    near = sorted((layer for layer in able if layer.error <= LAYER), key=lambda layer: layer.error)
    kept, step = _within_budget(tuple(layer.name for layer in near), step_error)
    finite = [layer for layer in able if math.isfinite(layer.error)]
    farthest = max(finite, key=lambda layer: layer.error, default=LayerError("", 0.0, 0))
    return Sums(
        layers=tuple(layer.name for layer in able if layer.name in kept),
        islands=tuple(layer.name for layer in able if layer.name not in kept),
        overflows=tuple(layer.name for layer in able if not math.isfinite(layer.error)),
        largest=farthest.error,
        farthest=farthest.name,
        step=step,
    )


@dataclass(frozen=True)
class _Group:
    """Layers, and how far a step is off in which they alone accumulate in fp16."""

    layers: tuple[str, ...]
    step: float


def _within_budget(
    layers: tuple[str, ...], step_error: Callable[[tuple[str, ...]], float]
) -> tuple[frozenset[str], float]:
    """Return those of the layers by which a step is within the budget, and how far it is off.

    A layer that is off by little may still matter much: it is halves of the layers that are tried, and halves of those
    that matter, until few are left out.

    layers: the nearest first.
    """
    if not layers:
        return frozenset(), 0.0
    groups, made = [_Group(layers, step_error(layers))], 1
    while True:
        kept, left = _parted(groups)
        lost = sum(len(group.layers) for group in left)
        largest = max(left, key=lambda group: len(group.layers), default=_Group((), 0.0))
        if lost <= LOST * len(layers) or len(largest.layers) < 2 or made + 2 >= TRIALS:
            break
        half = len(largest.layers) // 2
        parts = largest.layers[:half], largest.layers[half:]
        groups = [group for group in groups if group is not largest] + [
            _Group(part, step_error(part)) for part in parts
        ]
        made += 2
    while kept:
        names = tuple(name for group in kept for name in group.layers)
        step = kept[0].step if len(kept) == 1 else step_error(names)
        made += len(kept) > 1
        if step <= BUDGET:
            return frozenset(names), step
        kept = kept[:-1] if made < TRIALS else []
    return frozenset(), 0.0


def _parted(groups: Sequence[_Group]) -> tuple[list[_Group], list[_Group]]:
    """Return the groups that are within the budget together, the least harmful first, and the others.

    Rounding errors of different layers have nothing to do with each other, so their squares add up.
    """
    kept: list[_Group] = []
    room = BUDGET**2
    for group in sorted(groups, key=lambda group: group.step**2 / len(group.layers)):
        if group.step**2 <= room:
            room -= group.step**2
            kept.append(group)
    return kept, [group for group in groups if group not in kept]


def _named(layers: tuple[str, ...]) -> str:
    named = ", ".join(f"'{name}'" for name in layers[:3])
    return named if len(layers) <= 3 else Message("{} and {} more", named, len(layers) - 3)
