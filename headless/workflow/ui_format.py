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
from .graph import Graph, Link, Node, whole
from .schema import Schema
from .subgraphs import BYPASSED, MUTED, Level, Unfolded, unfold
from .ui_file import UiFile, UiNode
from .ui_links import GETTER, HANDS_ON, PRIMITIVE, Sources
from .ui_names import PREFIX, SAVERS, Names, types_named
from .ui_texts import chosen
from .ui_widgets import widget_values

FRONTEND_ONLY = frozenset({"Note", "MarkdownNote", PRIMITIVE, GETTER}) | HANDS_ON
DATE = "%date:"
# nodes that are no more than the page draws or does: their packs bring no such type to a server
OF_THE_PAGE_ALONE = frozenset(
    f"{name} (rgthree)"
    for name in (
        *("Label", "Bookmark", "Fast Muter", "Fast Bypasser", "Fast Groups Muter", "Fast Groups Bypasser"),
        *("Fast Actions Button", "Mute / Bypass Relay", "Mute / Bypass Repeater", "Random Unmuter"),
        *("Node Collector", "Node Combiner"),
    )
)
# nodes, and types of inputs, whose pictures and sounds the page makes as it sends the workflow
RECORDERS = frozenset({"Load3D", "Load3DAnimation", "Load3DAdvanced", "WebcamCapture", "RecordAudio"})
RECORDED = frozenset({"LOAD_3D", "LOAD_3D_ANIMATION", "WEBCAM", "AUDIO_RECORD"})
A_SUBGRAPH = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # as a node's type
EXPORT_HINT = "In ComfyUI, use Workflow > Export (API) and run that file instead."


def class_types(data: Mapping[str, Any]) -> set[str]:
    """The node types whose schemas `convert` needs.

    Raises:
        WorkflowError: it can't be read, has group nodes, or subgraphs that can't be unfolded.
    """
    return _class_types(*_read(data))


def named_types(data: Mapping[str, Any]) -> set[str]:
    """The node types whose schemas `convert` uses where the host has them: of nodes that do not run, but that a file
    name means.

    Raises:
        WorkflowError: as `class_types`.
    """
    file, unfolded = _read(data)
    return types_named(unfolded) - _class_types(file, unfolded) - FRONTEND_ONLY - unfolded.subgraphs.keys()


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
        raise UnknownNodesError(
            f"Cannot read the workflow: the host has no node type {listed(missing)}. Install its pack there; if only "
            f"the browser has it, as with labels: {EXPORT_HINT}"
        )
    sources = Sources(unfolded, schemas)
    names = Names(unfolded, schemas, sources)
    converted: dict[str, Node] = {}
    prompts: dict[tuple[str, str], str] = {}
    dated: dict[tuple[str, str], str] = {}
    for level, node in unfolded.nodes():
        if not _runs(node):
            continue
        node_id, schema = f"{level.path}{node.id}", schemas[node.type]
        inputs = widget_values(node, schema)
        in_widgets = dict(inputs)  # what the page sends as its widgets make it
        for slot in node.inputs or ():
            found = sources.of(level, node, slot)
            if found is None:
                continue
            inputs[slot.name] = found.value
            in_widgets.pop(slot.name, None)
            if found.has_patterns and isinstance(found.value, str):
                inputs[slot.name] = names.fill_in(found.value)
                if DATE in found.value:
                    dated[node_id, slot.name] = found.value
            if found.in_widget:
                in_widgets[slot.name] = inputs[slot.name]
        specs = schema.inputs_with(inputs)
        if any(spec.type in RECORDED and not isinstance(inputs.get(spec.name), Link) for spec in specs.values()):
            raise _recorded(level, node)
        for name, text in in_widgets.items():
            if not isinstance(text, str):
                continue
            if node.type in SAVERS and name == PREFIX:
                inputs[name] = names.fill_in(text)
                if DATE in text:
                    dated[node_id, name] = text
            elif name in specs and specs[name].config.get("dynamicPrompts") is True:
                prompts[node_id, name] = text
        converted[node_id] = whole(Node(node_id, node.type, inputs, node.title or None, level.title))
    return chosen(Graph(converted, _as_saved(data), prompts, dated))


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
            raise WorkflowError(
                f"{where} group node, which only the browser can unfold. Open the workflow in a current ComfyUI and "
                "save it again: that makes a subgraph of it. Or use Workflow > Export (API) there."
            )
        if not _runs(node):
            continue
        if A_SUBGRAPH.fullmatch(node.type):
            raise WorkflowError(f"{where} subgraph that the file does not define. {EXPORT_HINT}")
        if node.type in OF_THE_PAGE_ALONE:
            raise WorkflowError(f"{where} '{node.type}', which is in the browser alone. {EXPORT_HINT}")
        if node.type in RECORDERS:
            raise _recorded(level, node)
    return {node.type for _, node in unfolded.nodes() if _runs(node)}


def _recorded(level: Level, node: UiNode) -> WorkflowError:
    return WorkflowError(
        f"Node {shown(level.path + node.id)} is a '{shown(node.type)}', whose pictures or sounds the browser makes as "
        f"it sends the workflow. {EXPORT_HINT}"
    )


def _runs(node: UiNode) -> bool:
    return node.mode not in (MUTED, BYPASSED) and node.type not in FRONTEND_ONLY


def _as_saved(data: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow as the page would save it: null in place of NaN and infinity, which JSON has not."""
    try:
        return json.loads(json.dumps(data), parse_constant=lambda _: None)
    except (RecursionError, TypeError, ValueError):
        raise WorkflowError(f"The workflow holds what JSON cannot. {EXPORT_HINT}") from None
