"""A matrix of prompts, seeds, sizes and precisions as settings of a workflow, each made when it is asked for.

A matrix of a million jobs is a few lists and a number: nothing here holds its product.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue

from ...trust.foreign import Foreign
from ...trust.text import listed, shown
from ..errors import WorkflowError
from ..workflow.graph import Graph, Link, Node
from ..workflow.schema import SEED_NAMES, Schema
from ..workflow.settings import Setting

MAX_JOBS = 10_000_000  # of one line
MAX_SEED = 2**64 - 1
PROMPT, PRECISION, FOLLOWS = "prompt", "precision", "inherit"
FRAMES = ("frames", "length", "num_frames", "video_frames")  # by what name nodes have them

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
    precisions: list[str] = []
    sizes: list[_Size] = []  # "WIDTHxHEIGHT" or "WIDTHxHEIGHTxFRAMES", in pixels
    inputs: dict[str, list[JsonValue]] = {}  # any other: NODE.INPUT → its values
    prompts: list[str] = []
    seeds: list[_Seed] | Seeds = []


@dataclass(frozen=True)
class Axis:
    """One thing that is varied."""

    values: Sequence[Any]
    settings: Callable[[Any], tuple[Setting, ...]]  # that a value stands for


@dataclass(frozen=True)
class Product:
    """All combinations. What is compiled for (precision, size) varies slowest, so that it changes least often."""

    axes: tuple[Axis, ...] = ()

    def __len__(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    def __getitem__(self, number: int) -> tuple[Setting, ...]:
        """The settings of one combination, from 0."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        found: list[tuple[Setting, ...]] = []
        for axis in reversed(self.axes):
            number, place = divmod(number, len(axis.values))
            found.append(axis.settings(axis.values[place]))
        return tuple(setting for settings in reversed(found) for setting in settings)


def product(matrix: Matrix, graph: Graph, schemas: Mapping[str, Schema]) -> Product:
    """The combinations of a matrix, for a workflow.

    Raises:
        WorkflowError: the workflow has no input, or several, that an axis could mean; or there are too many jobs.
    """
    for name in sorted(matrix.model_fields_set):
        if isinstance(values := getattr(matrix, name), list):
            _some(values, name)
    axes = [*_precisions(matrix, graph, schemas), *_sizes(matrix, graph, schemas)]
    for name, values in matrix.inputs.items():
        setting = Setting.parse(f"{name}=")
        setting.found_in(graph, schemas)
        axes.append(Axis(_some(values, name), lambda value, at=setting: (_to(at.node, at.input, value),)))
    if matrix.prompts:
        axes.append(_of_the_only(graph, schemas, "prompts", (PROMPT,), matrix.prompts))
    if isinstance(matrix.seeds, Seeds):
        last = matrix.seeds.first + matrix.seeds.count - 1
        if last > MAX_SEED:
            raise WorkflowError(f"Seeds go up to {MAX_SEED}, and these to {last}.")
        seeds: Sequence[int] = range(matrix.seeds.first, last + 1)
    else:
        seeds = matrix.seeds
    if seeds:
        axes.append(_of_the_only(graph, schemas, "seeds", tuple(sorted(SEED_NAMES)), seeds))
    made = Product(tuple(axes))
    if (jobs := math.prod(len(axis.values) for axis in axes)) > MAX_JOBS:
        raise WorkflowError(f"The matrix makes {jobs:,} jobs, and one line takes {MAX_JOBS:,}.")
    return made


def _precisions(matrix: Matrix, graph: Graph, schemas: Mapping[str, Schema]) -> list[Axis]:
    """Every precision that the workflow sets, as `compare` sets it."""
    if not matrix.precisions:
        return []
    nodes = [node for node in _having(graph, schemas, PRECISION) if node.inputs[PRECISION] != FOLLOWS]
    if not nodes:
        raise WorkflowError('The workflow sets no precision that "precisions" could vary: leave them out.')
    for node in nodes:
        options = schemas[node.class_type].inputs_with(node.inputs)[PRECISION].options
        if unknown := [value for value in matrix.precisions if value not in options]:
            raise WorkflowError(
                f"{node.label} has no precision {listed(map(repr, unknown))}. It has {listed(map(repr, options))}."
            )
    return [Axis(matrix.precisions, lambda value: tuple(_to(node.id, PRECISION, value) for node in nodes))]


def _sizes(matrix: Matrix, graph: Graph, schemas: Mapping[str, Schema]) -> list[Axis]:
    if not matrix.sizes:
        return []
    having = _having(graph, schemas, "width")
    node = _only([node for node in having if node in _having(graph, schemas, "height")], "sizes", ("width", "height"))
    frames = next((name for name in FRAMES if name in node.inputs), None)
    if frames is None and (long := [size for size in matrix.sizes if size.count("x") == 2]):
        raise WorkflowError(f"{node.label} has no frames, which {shown(long[0])} names. Write WIDTHxHEIGHT.")

    def settings(size: str) -> tuple[Setting, ...]:
        names = filter(None, ("width", "height", frames))
        return tuple(_to(node.id, name, int(number)) for name, number in zip(names, size.split("x"), strict=False))

    return [Axis(matrix.sizes, settings)]


def _of_the_only(
    graph: Graph, schemas: Mapping[str, Schema], axis: str, names: tuple[str, ...], values: Sequence[Any]
) -> Axis:
    """An axis of the one input that goes by one of these names."""
    found = [(node, name) for name in names for node in _having(graph, schemas, name)]
    node = _only([node for node, _ in found], axis, names)
    return Axis(values, lambda value, name=found[0][1]: (_to(node.id, name, value),))


def _having(graph: Graph, schemas: Mapping[str, Schema], name: str) -> list[Node]:
    """The nodes with an input of this name that holds a value, and no link."""
    return [
        node
        for node in graph.nodes.values()
        if name in schemas[node.class_type].inputs_with(node.inputs)
        and name in node.inputs
        and not isinstance(node.inputs[name], Link)
    ]


def _only(nodes: Sequence[Node], axis: str, names: tuple[str, ...]) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    found = listed(node.label for node in nodes) or "none"
    example = f'"inputs": {{"{nodes[0].id if nodes else "NODE"}.{names[-1]}": [...]}}'
    raise WorkflowError(
        f'"{axis}" means the one node of the workflow that has {" and ".join(names)}. Found: {found}. Name the inputs '
        f"that are to vary: {example}."
    )


def _some(values: list[Any], name: str) -> list[Any]:
    if not values:
        raise WorkflowError(f"The matrix has no value for {shown(name)}: write one, or leave it out.")
    return values


def _to(node: str, name: str, value: Any) -> Setting:
    return Setting(node, name, json.dumps(value))
