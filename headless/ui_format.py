"""UI-format workflows (what ComfyUI's Save writes) turned into the graph that a browser would send.

The browser's own nodes vanish on the way: notes, reroutes, primitives, and nodes that are muted or bypassed.
Widget values are stored by position, so the schemas of the nodes are needed to name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UnknownNodesError, WorkflowError
from .graph import Graph, Link, Node
from .schema import Schema

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
        WorkflowError: the workflow has subgraphs or group nodes.
    """
    nodes = _nodes(data)
    subgraphs = {str(s.get("id")) for s in (data.get("definitions") or {}).get("subgraphs") or ()}
    groups = set((data.get("extra") or {}).get("groupNodes") or ())
    for node in nodes.values():
        kind = str(node.get("type"))
        if kind in subgraphs or kind.startswith(("workflow/", "workflow>")) or kind in groups:
            what = "subgraph" if kind in subgraphs else "group node"
            raise WorkflowError(f"Node {node['id']} is a {what}, which only the browser can unfold. {EXPORT_HINT}")
    return {str(node["type"]) for node in nodes.values() if _runs(node)}


def convert(data: Mapping[str, Any], schemas: Mapping[str, Schema]) -> Graph:
    """The graph that ComfyUI's page would send for this UI-format workflow.

    Args:
        data: the workflow.
        schemas: by node type; at least those of `class_types(data)`.

    Raises:
        WorkflowError: a subgraph, a broken link table, or an unknown node type.
    """
    missing = sorted(class_types(data) - set(schemas))
    if missing:
        raise UnknownNodesError(f"Cannot read the workflow: the host has no node type {', '.join(missing)}.")
    nodes = _nodes(data)
    links = _links(data)
    converted = {
        node_id: Node(
            node_id,
            str(node["type"]),
            _inputs(node, schemas[str(node["type"])], nodes, links),
            node.get("title") or None,
        )
        for node_id, node in nodes.items()
        if _runs(node)
    }
    return Graph(converted, workflow=data)


def _runs(node: Mapping[str, Any]) -> bool:
    return node.get("mode", 0) not in (MUTED, BYPASSED) and node["type"] not in FRONTEND_ONLY


def _nodes(data: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    nodes = {}
    for node in data["nodes"]:
        if not isinstance(node, dict) or "id" not in node or "type" not in node:
            raise WorkflowError(f"The workflow has a node without id or type. {EXPORT_HINT}")
        nodes[str(node["id"])] = node
    return nodes


def _links(data: Mapping[str, Any]) -> dict[int, Link]:
    """The link table: id -> origin. Both layouts: [id, origin, slot, target, slot, type] and objects."""
    table = {}
    for link in data.get("links") or ():
        if isinstance(link, dict):
            link_id, origin, slot = link["id"], link["origin_id"], link["origin_slot"]
        elif isinstance(link, list) and len(link) >= 5:
            link_id, origin, slot = link[:3]
        else:
            raise WorkflowError(f"The workflow's link table has an entry that can't be read: {link}. {EXPORT_HINT}")
        table[link_id] = Link(str(origin), int(slot))
    return table


def _inputs(
    node: Mapping[str, Any],
    schema: Schema,
    nodes: Mapping[str, Mapping[str, Any]],
    links: Mapping[int, Link],
) -> dict[str, Any]:
    inputs = _widget_values(node, schema)
    for slot in node.get("inputs") or ():
        if slot.get("link") is None:
            continue
        source = _trace(slot["link"], nodes, links, str(slot.get("type", "*")))
        if isinstance(source, Link):
            inputs[slot["name"]] = source
        elif isinstance(source, _Value):
            inputs[slot["name"]] = source.value
    return inputs


def _widget_values(node: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    values = node.get("widgets_values") or []
    widgets = schema.widgets
    if isinstance(values, dict):
        return {spec.name: values[spec.name] for spec in widgets if spec.name in values}
    named: dict[str, Any] = {}
    position = 0
    for spec in widgets:
        if position >= len(values):
            break
        named[spec.name] = values[position]
        position += 1
        if spec.may_have_control and position < len(values) and values[position] in CONTROL_VALUES:
            position += 1
    return named


def _trace(
    link_id: int, nodes: Mapping[str, Mapping[str, Any]], links: Mapping[int, Link], wanted: str
) -> Link | _Value | None:
    """Follow a link upstream through what the browser resolves itself; None where nothing feeds it."""
    seen: set[int] = set()
    while link_id not in seen:
        seen.add(link_id)
        origin = links.get(link_id)
        if origin is None or origin.node not in nodes:
            raise WorkflowError(f"Link {link_id} of the workflow leads nowhere. {EXPORT_HINT}")
        node = nodes[origin.node]
        if node.get("mode", 0) == MUTED:
            return None
        if node["type"] == "PrimitiveNode":
            values = node.get("widgets_values") or [None]
            return _Value(values[0])
        if node["type"] == "Reroute":
            upstream = (node.get("inputs") or [{}])[0].get("link")
        elif node.get("mode", 0) == BYPASSED:
            upstream = _bypass(node, origin.slot, wanted)
        else:
            return origin
        if upstream is None:
            return None
        link_id = upstream
    raise WorkflowError(f"The workflow's reroutes or bypassed nodes run in a circle at link {link_id}. Cut it.")


def _bypass(node: Mapping[str, Any], slot: int, wanted: str) -> int | None:
    """The link that stands in for output `slot` of a bypassed node: the input of the same place, else of the type."""
    inputs = node.get("inputs") or []
    outputs = node.get("outputs") or []
    kind = str(outputs[slot].get("type", wanted)) if slot < len(outputs) else wanted
    for candidate in [*inputs[slot : slot + 1], *inputs]:
        if candidate.get("type") == kind:
            return candidate.get("link")
    return None
