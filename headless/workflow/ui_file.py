"""The parts of a UI-format file that matter, with subgraphs unfolded: each subgraph node becomes its inner nodes, with
ids like "1:2:3". All other parts concern the page only: positions, colours, collapsed nodes.

A level is one canvas: the workflow itself, or the inside of one subgraph node. If a file has an id twice, the page
gives the second node a new id when it opens the file; so does this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Annotated, Any

from pydantic import (
    AliasPath,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from ...trust.foreign import Foreign
from ...trust.message import shown
from ..errors import WorkflowError

MUTED, BYPASSED = 2, 4  # LiteGraph's node modes
INPUTS = "-10"  # origin id of links, within a subgraph, that come from outside
SETTER = "SetNode"  # the Set node of KJNodes
MAX_NODES = 100_000  # most nodes of an unfolded workflow
MAX_PATH = 500  # most characters of the ids of the subgraph nodes around a node


def _whole(value: Any) -> Any:
    """Convert a whole float to int: the page has one kind of number, and tools that write its files use 1.0 for 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: Any) -> Any:
    """Return an id as text: for the page, 5 and "5" are the same."""
    value = _whole(value)
    return str(value) if type(value) is int else value


def _if_it_fits(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Read a field that packs and tools add to a file; None if it is not in the page's format."""
    try:
        return read(value)
    except ValidationError:
        return None


def _within(*path: str, default: Any = None) -> Any:
    """Return a field at a nested path of the file."""
    return Field(default=default, validation_alias=AliasPath(*path))


Id = Annotated[str, BeforeValidator(_as_text)]
Whole = Annotated[int, BeforeValidator(_whole)]
Type = Annotated[str, BeforeValidator(str)]  # old files have a drop-down's options here
WhereItFits = WrapValidator(_if_it_fits)
_Promotion = Annotated[list[str], Field(min_length=2)]


class UiInput(Foreign):
    name: str
    type: Type = "*"
    link: Id | None = None


class UiOutput(Foreign):
    type: Type = "*"


class UiNode(Foreign):
    model_config = ConfigDict(populate_by_name=False)

    id: Id
    type: str
    mode: Whole | None = 0
    title: str | None = None
    inputs: list[UiInput] | None = None
    outputs: list[UiOutput] | None = None
    # subgraph node: [inner node's id, widget name, ...] for each inner widget that it shows; until early 2026
    promoted: Annotated[list[_Promotion] | None, WhereItFits] = _within("properties", "proxyWidgets")
    # primitive node: whether %patterns% in its value are filled in
    fills_in: Annotated[JsonValue, WhereItFits] = _within("properties", "Run widget replace on values")
    # the node's name in patterns of file names
    name: Annotated[JsonValue, WhereItFits] = _within("properties", "Node name for S&R", default="")
    widgets_values: list[JsonValue] | dict[str, JsonValue] | None = None

    @property
    def stored(self) -> list[Any]:
        """Its widgets' values, in order; [] if they are stored by name."""
        return self.widgets_values if isinstance(self.widgets_values, list) else []

    @property
    def first_value(self) -> JsonValue:
        """The value of its first widget, for nodes that the page itself makes; None if it has no value."""
        return next(iter(self.stored), None)

    @cached_property
    def first_of_type(self) -> dict[str, UiInput]:
        """Type -> its first input of exactly that type."""
        return {slot.type: slot for slot in reversed(self.inputs or ())}


class UiLink(Foreign):
    id: Id
    origin_id: Id
    origin_slot: Whole

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        """Convert [id, origin, slot, target, slot, type], the old format of links."""
        names = ("id", "origin_id", "origin_slot")
        return dict(zip(names, value, strict=False)) if isinstance(value, list) else value


class UiPort(Foreign):
    """An input or an output of a subgraph."""

    name: str
    links: list[Id] | None = Field(default=None, alias="linkIds")  # inside the subgraph


class UiSubgraph(Foreign):
    id: Id
    name: str | None = None
    nodes: list[UiNode] | None = None
    links: list[UiLink | None] | None = None
    inputs: list[UiPort] | None = None
    outputs: list[UiPort] | None = None


class _Definitions(Foreign):
    subgraphs: list[UiSubgraph] | None = None


class UiFile(Foreign):
    model_config = ConfigDict(populate_by_name=False)

    last_node_id: Annotated[JsonValue, BeforeValidator(_whole)] = None
    nodes: list[UiNode]
    links: list[UiLink | None] | None = None
    definitions: _Definitions | None = None
    group_nodes: Annotated[dict[str, JsonValue] | None, WhereItFits] = _within("extra", "groupNodes")


@dataclass(frozen=True, eq=False)
class Canvas:
    """The nodes and links of one canvas. No other canvas of the file has the same node ids."""

    nodes: Mapping[str, UiNode]
    links: Mapping[str, UiLink]
    name: str = ""
    inputs: tuple[UiPort, ...] = ()
    outputs: tuple[UiPort, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # id in the file -> new id, for nodes whose id changed

    @cached_property
    def targets(self) -> dict[str, tuple[UiNode, UiInput]]:
        """Link id -> the node and input that it leads to. Links to the subgraph's outputs are not included."""
        return {slot.link: (node, slot) for node in self.nodes.values() for slot in node.inputs or () if slot.link}

    @cached_property
    def setters(self) -> dict[str, list[UiNode]]:
        found: dict[str, list[UiNode]] = {}
        for node in self.nodes.values():
            if node.type == SETTER and isinstance(node.first_value, str) and node.first_value:
                found.setdefault(node.first_value, []).append(node)
        return found


@dataclass(frozen=True, eq=False)
class Level:
    """A canvas at its place in the workflow."""

    canvas: Canvas
    path: str = ""  # prefix of its nodes' ids: "1:2:"
    title: str | None = None  # the subgraph node's title
    host: tuple[Level, UiNode] | None = None  # the subgraph node and its level

    def around(self) -> Iterator[Level]:
        """Yield this level and the levels around it, from the inside out."""
        level = self
        yield level
        while level.host:
            level = level.host[0]
            yield level


@dataclass(frozen=True)
class Unfolded:
    levels: Mapping[str, Level]  # by path; the workflow itself is ""
    subgraphs: Mapping[str, Canvas]  # by node type
    groups: frozenset[str]  # node types that are group nodes

    def nodes(self) -> Iterator[tuple[Level, UiNode]]:
        """Yield all nodes except the subgraph nodes themselves."""
        for level in self.levels.values():
            for node in level.canvas.nodes.values():
                if node.type not in self.subgraphs:
                    yield level, node


def unfold(file: UiFile) -> Unfolded:
    """Return every canvas of the workflow, once per use. A muted or bypassed subgraph node of the top level stays
    folded.

    Raises WorkflowError if two nodes of a canvas have one id, a subgraph contains itself, or there are too many nodes.
    """
    workflow, subgraphs = _canvases(file)
    levels = {"": Level(workflow)}
    waiting, number = list(levels.values()), len(workflow.nodes)
    while waiting:
        level = waiting.pop()
        for node in level.canvas.nodes.values():
            inside = subgraphs.get(node.type)
            if inside is None or (level.host is None and node.mode in (MUTED, BYPASSED)):
                continue
            below = _below(level, node, inside)
            number += len(inside.nodes)
            if number > MAX_NODES:
                raise WorkflowError(f"The workflow's subgraphs expand to more than {MAX_NODES:,} nodes.")
            levels[below.path] = below
            waiting.append(below)
    return Unfolded(levels, subgraphs, frozenset(file.group_nodes or ()))


def _below(level: Level, node: UiNode, inside: Canvas) -> Level:
    title = shown(node.title or inside.name or "a subgraph", 100)
    path = f"{level.path}{node.id}:"
    if len(path) > MAX_PATH:
        raise WorkflowError(
            f"The subgraph '{title}' contains itself, or is nested too deeply: its id, {shown(path)}, has more than "
            f"{MAX_PATH} letters. Delete it there."
        )
    return Level(inside, path, title, (level, node))


def _canvases(file: UiFile) -> tuple[Canvas, dict[str, Canvas]]:
    """Return the workflow's own canvas, and the subgraphs' canvases by node type."""
    workflow = Canvas(_by_id(file.nodes, "the workflow"), _links(file.links))
    definitions = {each.id: each for each in (file.definitions and file.definitions.subgraphs) or ()}
    last = file.last_node_id if type(file.last_node_id) is int else 0
    taken = set(workflow.nodes)
    subgraphs: dict[str, Canvas] = {}
    for kind, subgraph in definitions.items():
        nodes = _by_id(subgraph.nodes or (), f"the subgraph '{shown(subgraph.name or kind)}'")
        renamed: dict[str, str] = {}
        for node_id in nodes:
            if node_id in taken:
                last = next(number for number in count(last + 1) if str(number) not in taken)
                renamed[node_id] = str(last)
            elif node_id.isdecimal() and len(node_id) < 10:
                last = max(last, int(node_id))
            taken.add(renamed.get(node_id, node_id))
        links = _links(subgraph.links)
        for old, new in renamed.items():
            nodes[old] = nodes[old].model_copy(update={"id": new})
        for link in [link for link in links.values() if link.origin_id in renamed]:
            links[link.id] = link.model_copy(update={"origin_id": renamed[link.origin_id]})
        ports = tuple(subgraph.inputs or ()), tuple(subgraph.outputs or ())
        subgraphs[kind] = Canvas({n.id: n for n in nodes.values()}, links, subgraph.name or "", *ports, renamed)
    return workflow, subgraphs


def _by_id(nodes: Iterable[UiNode], where: str) -> dict[str, UiNode]:
    found: dict[str, UiNode] = {}
    for node in nodes:
        if node.id in found:
            raise WorkflowError(f"Two nodes of {where} have the id {shown(node.id)}.")
        found[node.id] = node
    return found


def _links(links: Iterable[UiLink | None] | None) -> dict[str, UiLink]:
    return {link.id: link for link in links or () if link}
