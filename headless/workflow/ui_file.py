"""What is read of a UI-format file, and its subgraphs unfolded: each subgraph node becomes the nodes in it, as ids
"1:2:3". The rest of a file is the page's own: places, colours, what is folded.

A level is what one canvas shows: the workflow itself, or what is in one subgraph node. Where a file has an id twice,
the page gives the second node another one as it opens it; so does this.
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
INPUTS = "-10"  # what links within a subgraph have for an origin where they come from outside
SETTER = "SetNode"  # of KJNodes
MAX_NODES = 100_000  # of a workflow that is unfolded
MAX_PATH = 500  # letters of the ids of the subgraph nodes around a node


def _whole(value: Any) -> Any:
    """To the page all numbers are of one kind, and tools that write its files make floats of them: 1.0 is 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: Any) -> Any:
    """An id as text: the page takes 5 and "5" for the same."""
    value = _whole(value)
    return str(value) if type(value) is int else value


def _if_it_fits(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """What packs and tools keep in a file beside the workflow, where that is laid out as the page does it."""
    try:
        return read(value)
    except ValidationError:
        return None


def _within(*path: str) -> Any:
    """A field that lies deeper in the file."""
    return Field(default=None, validation_alias=AliasPath(*path))


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
    # of a subgraph node: [id of an inner node, its widget, ...] for each widget that is shown on it; up to early 2026
    promoted: Annotated[list[_Promotion] | None, WhereItFits] = _within("properties", "proxyWidgets")
    # of a primitive, in its value
    fills_in: Annotated[JsonValue, WhereItFits] = _within("properties", "Run widget replace on values")
    # by which patterns in file names mean it
    name: Annotated[JsonValue, WhereItFits] = Field(
        default="", validation_alias=AliasPath("properties", "Node name for S&R")
    )
    widgets_values: list[JsonValue] | dict[str, JsonValue] | None = None

    @property
    def stored(self) -> list[Any]:
        """What its widgets hold, in their order."""
        return self.widgets_values if isinstance(self.widgets_values, list) else []

    @property
    def first_value(self) -> JsonValue:
        """What its first widget holds, in a node that the page itself makes."""
        return next(iter(self.stored), None)

    @cached_property
    def first_of_type(self) -> dict[str, UiInput]:
        """By type, its first input of exactly that."""
        return {slot.type: slot for slot in reversed(self.inputs or ())}


class UiLink(Foreign):
    id: Id
    origin_id: Id
    origin_slot: Whole

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        """Of [id, origin, slot, target, slot, type], as links were written at first."""
        names = ("id", "origin_id", "origin_slot")
        return dict(zip(names, value, strict=False)) if isinstance(value, list) else value


class UiPort(Foreign):
    """An input or an output of a subgraph."""

    name: str
    links: list[Id] | None = Field(default=None, alias="linkIds")  # within it


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
    """Nodes and links, with ids that no other canvas of the file has."""

    nodes: Mapping[str, UiNode]
    links: Mapping[str, UiLink]
    name: str = ""
    inputs: tuple[UiPort, ...] = ()
    outputs: tuple[UiPort, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # ids that the file has, of nodes that have others here

    @cached_property
    def targets(self) -> dict[str, tuple[UiNode, UiInput]]:
        """By link, what it leads to; those to the subgraph's outputs are not among them."""
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
    """A canvas where it stands in the workflow."""

    canvas: Canvas
    path: str = ""  # what stands before its nodes' ids: "1:2:"
    title: str | None = None  # of the subgraph node
    host: tuple[Level, UiNode] | None = None  # the subgraph node, and where that stands

    def around(self) -> Iterator[Level]:
        """This one, and those that it stands in, from the inside out."""
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
        """All but the subgraph nodes themselves."""
        for level in self.levels.values():
            for node in level.canvas.nodes.values():
                if node.type not in self.subgraphs:
                    yield level, node


def unfold(file: UiFile) -> Unfolded:
    """Every canvas of the workflow, as often as it stands there; a subgraph node of the workflow itself that is muted
    or bypassed stays folded.

    Raises WorkflowError where two nodes of a canvas have one id, a subgraph holds itself, or it is too much.
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
                raise WorkflowError(f"The workflow's subgraphs unfold to more than {MAX_NODES:,} nodes.")
            levels[below.path] = below
            waiting.append(below)
    return Unfolded(levels, subgraphs, frozenset(file.group_nodes or ()))


def _below(level: Level, node: UiNode, inside: Canvas) -> Level:
    title = shown(node.title or inside.name or "a subgraph", 100)
    path = f"{level.path}{node.id}:"
    if len(path) > MAX_PATH:
        raise WorkflowError(
            f"The subgraph '{title}' holds itself, or stands too deep in others: its id, {shown(path)}, has more than "
            f"{MAX_PATH} letters. Delete it there."
        )
    return Level(inside, path, title, (level, node))


def _canvases(file: UiFile) -> tuple[Canvas, dict[str, Canvas]]:
    """What the workflow itself shows, and by node type what each subgraph does."""
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
