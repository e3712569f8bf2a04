"""UI-format workflows (what ComfyUI's Save writes) turned into the graph that a browser would send.

The browser's own nodes vanish on the way: notes, reroutes, primitives, and nodes that are muted or bypassed.
Widget values are stored by position, so the schemas of the nodes are needed to name them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..trust.foreign import Unreadable, fitting
from ..trust.text import listed, shown
from .errors import UnknownNodesError, WorkflowError
from .graph import Graph, Link, Node
from .schema import Schema
from .ui_file import UiFile, UiNode

MUTED, BYPASSED = 2, 4  # LiteGraph's node modes
NOTES = frozenset({"Note", "MarkdownNote"})
FRONTEND_ONLY = NOTES | {"Reroute", "PrimitiveNode"}
CONTROL_VALUES = frozenset({"fixed", "increment", "decrement", "randomize", "increment-wrap"})
EXPORT_HINT = "In ComfyUI, use Workflow > Export (API) and run that file instead."


@dataclass(frozen=True)
class _Value:
    """A plain value that a PrimitiveNode hands to the input it is linked to."""

    value: Any


def class_types(data: Mapping[str, Any]) -> set[str]:
    """The node types whose schemas `convert` needs.

    Raises:
        WorkflowError: it can't be read, or has subgraphs or group nodes.
    """
    return _class_types(_read(data))


def convert(data: Mapping[str, Any], schemas: Mapping[str, Schema]) -> Graph:
    """The graph that ComfyUI's page would send for this UI-format workflow.

    Args:
        data: the workflow.
        schemas: by node type; at least those of `class_types(data)`.

    Raises:
        WorkflowError: it can't be read, a subgraph, a broken link table, or an unknown node type.
    """
    file = _read(data)
    missing = sorted(_class_types(file) - set(schemas))
    if missing:
        raise UnknownNodesError(f"Cannot read the workflow: the host has no node type {listed(missing)}.")
    sources = _Sources(file)
    converted = {
        node.id: Node(node.id, node.type, _inputs(node, schemas[node.type], sources), node.title or None)
        for node in file.nodes
        if _runs(node)
    }
    return Graph(converted, workflow=_as_saved(data))


def _read(data: Mapping[str, Any]) -> UiFile:
    try:
        file = fitting(UiFile, data)
    except Unreadable as error:
        raise WorkflowError(f"This is not a workflow in ComfyUI's format: {error}. {EXPORT_HINT}") from None
    seen: set[str] = set()
    for node in file.nodes:
        if node.id in seen:
            raise WorkflowError(f"Two nodes of the workflow have the id {shown(node.id)}. {EXPORT_HINT}")
        seen.add(node.id)
    return file


def _class_types(file: UiFile) -> set[str]:
    subgraphs, groups = file.subgraphs(), file.groups()
    for node in file.nodes:
        if node.type in subgraphs or node.type in groups or node.type.startswith(("workflow/", "workflow>")):
            what = "subgraph" if node.type in subgraphs else "group node"
            raise WorkflowError(f"Node {shown(node.id)} is a {what}, which only the browser can unfold. {EXPORT_HINT}")
    return {node.type for node in file.nodes if _runs(node)}


def _runs(node: UiNode) -> bool:
    return node.mode not in (MUTED, BYPASSED) and node.type not in FRONTEND_ONLY


def _as_saved(data: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow as the page would save it: null in place of NaN and infinity, which JSON has not."""
    try:
        return json.loads(json.dumps(data), parse_constant=lambda _: None)
    except (RecursionError, TypeError, ValueError):
        raise WorkflowError(f"The workflow holds what JSON cannot. {EXPORT_HINT}") from None


def _inputs(node: UiNode, schema: Schema, sources: _Sources) -> dict[str, Any]:
    inputs = _widget_values(node, schema)
    for slot in node.inputs or ():
        if slot.link is None:
            continue
        source = sources.of(slot.link)
        if isinstance(source, Link):
            inputs[slot.name] = source
        elif isinstance(source, _Value):
            inputs[slot.name] = source.value
    return inputs


def _widget_values(node: UiNode, schema: Schema) -> dict[str, Any]:
    values, widgets = node.widgets_values, schema.widgets
    if isinstance(values, dict):
        return {spec.name: values[spec.name] for spec in widgets if spec.name in values}
    if not isinstance(values, list):
        return {}
    named: dict[str, Any] = {}
    position = 0
    for spec in widgets:
        if position >= len(values):
            break
        named[spec.name] = values[position]
        position += 1
        if spec.may_have_control and position < len(values) and _is_control(values[position]):
            position += 1
    return named


def _is_control(value: Any) -> bool:
    return isinstance(value, str) and value in CONTROL_VALUES


class _Sources:
    """Where links come from in the end, through what the browser resolves itself. Each is followed once."""

    def __init__(self, file: UiFile) -> None:
        self.nodes = {node.id: node for node in file.nodes}
        self.origins = {link.id: Link(link.origin_id, link.origin_slot) for link in file.links or () if link}
        self.found: dict[str, Link | _Value | None] = {}
        self.stand_ins: dict[str, dict[str, str | None]] = {}

    def of(self, link: str) -> Link | _Value | None:
        """A node's output, a plain value, or None where nothing feeds the link.

        Raises:
            WorkflowError: it leads nowhere, or in a circle.
        """
        way: dict[str, None] = {}
        at: str | None = link
        while at is not None and at not in self.found:
            if at in way:
                raise WorkflowError(
                    f"The workflow's reroutes or bypassed nodes run in a circle at link {shown(at)}. Cut it."
                )
            way[at] = None
            end = self._upstream(at)
            if not isinstance(end, str):
                self.found[at] = end
                break
            at = end
        source = self.found[at] if at is not None else None
        self.found |= dict.fromkeys(way, source)
        return source

    def _upstream(self, link: str) -> Link | _Value | str | None:
        """One step: a link's id where the browser would go on, else where it ends."""
        origin = self.origins.get(link)
        if origin is None or origin.node not in self.nodes:
            raise WorkflowError(f"Link {shown(link)} of the workflow leads nowhere. {EXPORT_HINT}")
        node = self.nodes[origin.node]
        if node.mode == MUTED:
            return None
        if node.type == "PrimitiveNode":
            values = node.widgets_values
            return _Value(values[0] if isinstance(values, list) and values else None)
        if node.type == "Reroute":
            return node.inputs[0].link if node.inputs else None
        if node.mode == BYPASSED:
            return self._bypass(node, origin.slot)
        return origin

    def _bypass(self, node: UiNode, slot: int) -> str | None:
        """The link that stands in for an output of a bypassed node: the input of the same place, else of the type."""
        inputs, outputs = node.inputs or [], node.outputs or []
        if not 0 <= slot < len(outputs):
            raise WorkflowError(
                f"A link takes output {shown(slot)} of node {shown(node.id)}, which has {len(outputs)}. {EXPORT_HINT}"
            )
        kind = outputs[slot].type
        if slot < len(inputs) and inputs[slot].type == kind:
            return inputs[slot].link
        if node.id not in self.stand_ins:
            self.stand_ins[node.id] = {slot.type: slot.link for slot in reversed(inputs)}
        return self.stand_ins[node.id].get(kind)
