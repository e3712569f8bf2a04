"""A matrix of prompts, seeds, sizes and precisions: what varies of a workflow, and each combination as its settings."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, JsonValue

from ...trust.foreign import Foreign
from ...trust.text import listed
from ..errors import WorkflowError
from ..workflow.graph import Graph, Link, Node
from ..workflow.schema import SEED_NAMES, Schema
from ..workflow.settings import Setting

MAX_JOBS = 10_000_000  # of one line
MAX_SEED = 2**64 - 1
PRECISION, FOLLOWS = "precision", "inherit"
FRAMES = ("frames", "length", "num_frames", "video_frames")  # by what name nodes have them

T = TypeVar("T")
_Some = Annotated[list[T], Field(min_length=1)]
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
_Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(x[1-9][0-9]{0,4})?$")]


class Seeds(Foreign):
    """So many seeds, one after the other."""

    model_config = ConfigDict(extra="forbid")
    first: _Seed = 0
    count: Annotated[int, Field(ge=1, le=MAX_JOBS)]


class Matrix(Foreign):
    """What is varied. Every value of each is combined with every value of the others."""

    model_config = ConfigDict(extra="forbid")
    precisions: _Some[str] = []
    sizes: _Some[_Size] = []  # "WIDTHxHEIGHT" or "WIDTHxHEIGHTxFRAMES", in pixels
    inputs: dict[str, _Some[JsonValue]] = {}  # any other: NODE.INPUT → its values
    prompts: _Some[str] = []
    seeds: _Some[_Seed] | Seeds = []


@dataclass(frozen=True)
class Axis:
    """Inputs that vary together."""

    inputs: Sequence[tuple[str, str]]  # node and name of each
    values: Sequence[Any]  # each a tuple with a value for each input, or one value for all

    def settings(self, value: Any) -> Iterator[Setting]:
        values = value if isinstance(value, tuple) else itertools.repeat(value)
        for (node, name), each in zip(self.inputs, values, strict=False):
            yield Setting(node, name, json.dumps(each))


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[Setting, ...]]:
    """The settings of each combination, the last axis varying fastest. Its values may be millions: they are not kept,
    as `itertools.product` would."""
    *slow, fast = axes or [Axis((), (None,))]
    for chosen in itertools.product(*(axis.values for axis in slow)):
        for value in fast.values:
            pairs = zip((*slow, fast), (*chosen, value), strict=True)
            yield tuple(setting for axis, each in pairs for setting in axis.settings(each))


def axes_of(matrix: Matrix, graph: Graph, schemas: Mapping[str, Schema]) -> list[Axis]:
    """What a matrix varies of a workflow. What is compiled for (precision, size) comes first, to change least often.

    Raises:
        WorkflowError: the workflow has no input, or several, that an axis could mean; or there are too many jobs.
    """

    def having(name: str) -> list[Node]:
        """The nodes with an input of this name that holds a value, and no link."""
        return [
            node
            for node in graph.nodes.values()
            if name in schemas[node.class_type].inputs_with(node.inputs)
            and not isinstance(node.inputs.get(name, Link("", 0)), Link)
        ]

    axes: list[Axis] = []
    if matrix.precisions:
        nodes = [node for node in having(PRECISION) if node.inputs[PRECISION] != FOLLOWS]
        if not nodes:
            raise WorkflowError('The workflow sets no precision that "precisions" could vary: leave them out.')
        axes.append(Axis([(node.id, PRECISION) for node in nodes], matrix.precisions))
    if matrix.sizes:
        tall = having("height")
        node, _ = _only("sizes", [(node, "width") for node in having("width") if node in tall])
        frames = [name for name in FRAMES if name in graph.nodes[node].inputs][:1]
        sizes = [tuple(map(int, size.split("x"))) for size in matrix.sizes]
        if not frames and any(len(size) == 3 for size in sizes):
            raise WorkflowError(f"{graph.nodes[node].label} has no frames: write its sizes as WIDTHxHEIGHT.")
        axes.append(Axis([(node, name) for name in ("width", "height", *frames)], sizes))
    for name, values in matrix.inputs.items():
        setting = Setting.parse(f"{name}=")
        setting.found_in(graph, schemas)
        axes.append(Axis([(setting.node, setting.input)], values))
    seeds = matrix.seeds
    if isinstance(seeds, Seeds):
        seeds = range(seeds.first, seeds.first + seeds.count)
    for axis, names, values in (("prompts", ("prompt",), matrix.prompts), ("seeds", sorted(SEED_NAMES), seeds)):
        if values:
            axes.append(Axis([_only(axis, [(node, name) for name in names for node in having(name)])], values))
    if (jobs := count(axes)) > MAX_JOBS:
        raise WorkflowError(f"The matrix makes {jobs:,} jobs, and one line takes {MAX_JOBS:,}.")
    return axes


def count(axes: Sequence[Axis]) -> int:
    return math.prod(len(axis.values) for axis in axes)


def _only(axis: str, found: Sequence[tuple[Node, str]]) -> tuple[str, str]:
    """The one input that an axis can mean."""
    if len(found) != 1:
        raise WorkflowError(
            f'"{axis}" means the one node of the workflow that has such an input. Found: '
            f"{listed(node.label for node, _ in found) or 'none'}. Name the inputs that are to vary: "
            f'"inputs": {{"NODE.INPUT": [...]}}.'
        )
    ((node, name),) = found
    return node.id, name
