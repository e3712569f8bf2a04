"""A probe's layers as rows that a person can take in: the same layer of all blocks is one row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ...precision.probe import Probed

MOST_ROWS = 36
BLOCK = "block output"
STREAM = "residual stream"
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")  # "0" in "resnets.0.conv1", not in "to_out.0"


@dataclass
class Row:
    """max |x| of one kind of layer; nothing where it did not run."""

    label: str
    by_step: dict[int, float] = field(default_factory=dict)  # of all blocks
    by_block: dict[str, float] = field(default_factory=dict)  # of all steps; empty outside of blocks

    @property
    def reach(self) -> float:
        return max(self.by_step.values(), default=0.0)


@dataclass(frozen=True)
class Rows:
    rows: tuple[Row, ...]  # in the order in which they ran; of a block's, its output first
    blocks: tuple[str, ...]  # names of those that have a column
    left_out: int  # rows with the smallest values
    below: float  # the most that those reach


def rows_of(probed: Probed, most: int = MOST_ROWS) -> Rows:
    """Rows by layer within its block; where those are more than `most`, without the numbers in their names; where they
    still are, those that reach the most."""
    blocks = probed.anatomy.repeated
    rows = _rows(probed, blocks, lambda inner: inner)
    if len(rows) > most:
        rows = _rows(probed, blocks, lambda inner: _NUMBER.sub("*", inner))
    least = sorted((row.reach for row in rows), reverse=True)[:most][-1:]
    shown = [row for row in rows if [row.reach] >= least][:most]
    hidden = [row.reach for row in rows if row not in shown]
    return Rows(tuple(shown), blocks, len(hidden), max(hidden, default=0.0))


def _rows(probed: Probed, blocks: tuple[str, ...], kind: Callable[[str], str]) -> list[Row]:
    output = STREAM if probed.anatomy.stream else BLOCK
    found: dict[str, Row] = {}
    for index, step in enumerate(probed.steps):
        for name, values in step.items():
            block = next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)
            label = kind(name[len(block) + 1 :]) or output if block else name
            if block:
                found.setdefault(output, Row(output))
            row, reach = found.setdefault(label, Row(label)), probed.reach(name, values)
            row.by_step[index] = max(row.by_step.get(index, 0.0), reach)
            if block:
                row.by_block[block] = max(row.by_block.get(block, 0.0), reach)
    return list(found.values())
