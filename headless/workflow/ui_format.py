"""UI-format workflows (what ComfyUI's Save writes) turned into the graph that a browser would send.

The browser's own nodes vanish on the way: notes, reroutes, primitives, subgraphs, and nodes that are muted or bypassed.
Widget values are stored by position, so the schemas of the nodes are needed to name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...trust.foreign import Unreadable, fitting
from ...trust.text import listed, shown
from ..errors import UnknownNodesError, WorkflowError
from .graph import Graph, Node
from .schema import Schema
from .subgraphs import BYPASSED, MUTED, Unfolded, unfold
from .ui_file import UiFile, UiNode
from .ui_links import PRIMITIVE, REROUTE, Sources
from .ui_widgets import widget_values

FRONTEND_ONLY = frozenset({"Note", "MarkdownNote", REROUTE, PRIMITIVE})
A_SUBGRAPH = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # as a node's type
EXPORT_HINT = "In ComfyUI, use Workflow > Export (API) and run that file instead."


def class_types(data: Mapping[str, Any]) -> set[str]:
    """The node types whose schemas `convert` needs.

    Raises:
        WorkflowError: it can't be read, has group nodes, or subgraphs that can't be unfolded.
    """
    return _class_types(*_read(data))


def convert(data: Mapping[str, Any], schemas: Mapping[str, Schema]) -> Graph:
    """The graph that ComfyUI's page would send for this UI-format workflow. Nodes in subgraphs have ids like "1:2:3".

    Args:
        data: the workflow.
        schemas: by node type; at least those of `class_types(data)`.

    Raises:
        WorkflowError: it can't be read or unfolded, a broken link table, or an unknown node type.
    """
    file, unfolded = _read(data)
    missing = sorted(_class_types(file, unfolded) - set(schemas))
    if missing:
        raise UnknownNodesError(f"Cannot read the workflow: the host has no node type {listed(missing)}.")
    sources = Sources(unfolded, schemas)
    converted: dict[str, Node] = {}
    for level, node in unfolded.nodes():
        if _runs(node):
            inputs = widget_values(node, schemas[node.type])
            for slot in node.inputs or ():
                found = sources.of(level, node, slot)
                if found is not None:
                    inputs[slot.name] = found.value
            node_id = f"{level.path}{node.id}"
            converted[node_id] = Node(node_id, node.type, inputs, node.title or None, level.title)
    return Graph(converted, workflow=_as_saved(data))


def _read(data: Mapping[str, Any]) -> tuple[UiFile, Unfolded]:
    try:
        file = fitting(UiFile, data)
    except Unreadable as error:
        raise WorkflowError(f"This is not a workflow in ComfyUI's format: {error}. {EXPORT_HINT}") from None
    try:
        return file, unfold(file)
    except WorkflowError as error:
        raise WorkflowError(f"{error} {EXPORT_HINT}") from None


def _class_types(file: UiFile, unfolded: Unfolded) -> set[str]:
    groups = file.groups()
    for level, node in unfolded.nodes():
        where = f"Node {shown(level.path + node.id)} is a"
        if node.type in groups or node.type.startswith(("workflow/", "workflow>")):
            raise WorkflowError(f"{where} group node, which only the browser can unfold. {EXPORT_HINT}")
        if A_SUBGRAPH.fullmatch(node.type) and _runs(node):
            raise WorkflowError(f"{where} subgraph that the file does not define. {EXPORT_HINT}")
    return {node.type for _, node in unfolded.nodes() if _runs(node)}


def _runs(node: UiNode) -> bool:
    return node.mode not in (MUTED, BYPASSED) and node.type not in FRONTEND_ONLY


def _as_saved(data: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow as the page would save it: null in place of NaN and infinity, which JSON has not."""
    try:
        return json.loads(json.dumps(data), parse_constant=lambda _: None)
    except (RecursionError, TypeError, ValueError):
        raise WorkflowError(f"The workflow holds what JSON cannot. {EXPORT_HINT}") from None
