"""The subgraphs of a UI-format workflow unfolded: each subgraph node becomes the nodes in it, as ids "1:2:3".

A level is what one canvas shows: the workflow itself, or what is in one subgraph node. Where a file has an id twice,
the page gives the second node another one as it opens it; so does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...trust.text import shown
from ..errors import WorkflowError
from .ui_file import UiFile, UiInput, UiLink, UiNode, UiPort, UiSubgraph

MUTED, BYPASSED = 2, 4  # LiteGraph's node modes
INPUTS = "-10"  # what links within a subgraph have for an origin where they come from outside
MAX_NODES = 100_000  # of a workflow that is unfolded
MAX_PATH = 500  # letters of the ids of the subgraph nodes around a node


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
    def places(self) -> dict[str, int]:
        """Which input of the subgraph a name is."""
        return {port.name: place for place, port in enumerate(self.inputs)}

    def link_to_output(self, slot: int) -> str | None:
        """The link within that feeds an output of the subgraph."""
        links = (self.outputs[slot].links if 0 <= slot < len(self.outputs) else None) or ()
        return next((link for link in links if link in self.links), None)


@dataclass(frozen=True, eq=False)
class Level:
    """A canvas where it stands in the workflow."""

    canvas: Canvas
    path: str = ""  # what stands before its nodes' ids: "1:2:"
    title: str | None = None  # of the subgraph node
    above: Level | None = None
    node: UiNode | None = None  # the subgraph node, above


@dataclass(frozen=True)
class Unfolded:
    levels: Mapping[str, Level]  # by path; the workflow itself is ""
    subgraphs: Mapping[str, Canvas]  # by node type

    def nodes(self) -> Iterator[tuple[Level, UiNode]]:
        """All but the subgraph nodes themselves."""
        for level in self.levels.values():
            for node in level.canvas.nodes.values():
                if node.type not in self.subgraphs:
                    yield level, node


def unfold(file: UiFile) -> Unfolded:
    """Every canvas of the workflow, as often as it stands there; a subgraph node of the workflow itself that is muted
    or bypassed stays folded.

    Raises:
        WorkflowError: two nodes of a canvas have one id, a subgraph holds itself, or it is too much.
    """
    workflow, subgraphs = _canvases(file)
    levels = {"": Level(workflow)}
    waiting, count = list(levels.values()), len(workflow.nodes)
    while waiting:
        level = waiting.pop()
        for node in level.canvas.nodes.values():
            inside = subgraphs.get(node.type)
            if inside is None or (level.above is None and node.mode in (MUTED, BYPASSED)):
                continue
            below = _below(level, node, inside)
            count += len(inside.nodes)
            if count > MAX_NODES:
                raise WorkflowError(f"The workflow's subgraphs unfold to more than {MAX_NODES:,} nodes.")
            levels[below.path] = below
            waiting.append(below)
    return Unfolded(levels, subgraphs)


def _below(level: Level, node: UiNode, inside: Canvas) -> Level:
    title = shown(node.title or inside.name or "a subgraph", 100)
    path = f"{level.path}{node.id}:"
    if len(path) > MAX_PATH:
        raise WorkflowError(
            f"The subgraph '{title}' stands too deep in others: its id has more than {MAX_PATH} letters."
        )
    around: Level | None = level
    while around is not None:
        if around.canvas is inside:
            raise WorkflowError(f"The subgraph '{title}' holds itself, at node {shown(path[:-1])}. Delete it there.")
        around = around.above
    return Level(inside, path, title, level, node)


def _canvases(file: UiFile) -> tuple[Canvas, dict[str, Canvas]]:
    workflow = Canvas(_by_id(file.nodes, "the workflow"), _links(file.links))
    taken = set(workflow.nodes)
    last = file.last_node_id if type(file.last_node_id) is int else 0
    subgraphs: dict[str, Canvas] = {}
    for kind, subgraph in file.subgraphs().items():
        canvas = _canvas(subgraph)
        renamed: dict[str, str] = {}
        for node_id in canvas.nodes:
            if node_id in taken:
                while str(last := last + 1) in taken:
                    pass
                renamed[node_id] = str(last)
            elif node_id.isdecimal() and len(node_id) < 10:
                last = max(last, int(node_id))
            taken.add(renamed.get(node_id, node_id))
        subgraphs[kind] = _renamed(canvas, renamed) if renamed else canvas
    return workflow, subgraphs


def _canvas(subgraph: UiSubgraph) -> Canvas:
    name = subgraph.name or ""
    nodes = _by_id(subgraph.nodes or (), f"the subgraph '{shown(name or subgraph.id)}'")
    return Canvas(nodes, _links(subgraph.links), name, tuple(subgraph.inputs or ()), tuple(subgraph.outputs or ()))


def _renamed(canvas: Canvas, ids: Mapping[str, str]) -> Canvas:
    def new(name: str) -> str:
        return ids.get(name, name)

    nodes = {new(node.id): node.model_copy(update={"id": new(node.id)}) for node in canvas.nodes.values()}
    links = {
        link.id: link.model_copy(update={"origin_id": new(link.origin_id), "target_id": new(link.target_id)})
        for link in canvas.links.values()
    }
    return replace(canvas, nodes=nodes, links=links, renamed=ids)


def _by_id(nodes: Iterable[UiNode], where: str) -> dict[str, UiNode]:
    found: dict[str, UiNode] = {}
    for node in nodes:
        if node.id in found:
            raise WorkflowError(f"Two nodes of {where} have the id {shown(node.id)}.")
        found[node.id] = node
    return found


def _links(links: Iterable[UiLink | None] | None) -> dict[str, UiLink]:
    return {link.id: link for link in links or () if link}
