"""Convert a workflow of any format to a graph; a workflow in UI format (ComfyUI's Save) as the browser would send it.

The browser's own nodes are resolved: notes, reroutes, primitives, subgraphs, and muted or bypassed nodes. Widget values
are stored by position, so the schemas of the nodes are needed to name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...trust.foreign import Unreadable, fitting
from ...trust.message import listed, shown
from ..errors import UnknownNodesError, WorkflowError
from .graph import Graph, GraphNode, Link, from_api, is_ui_format, whole
from .schema import Schema
from .ui_file import BYPASSED, MUTED, Level, UiFile, UiNode, Unfolded, unfold
from .ui_texts import PREFIX, SAVERS, chosen, filling_in, types_named
from .ui_values import HANDS_ON, OF_THE_PAGE, Sources, with_widgets

FRONTEND_ONLY = HANDS_ON | OF_THE_PAGE.keys()
A_SUBGRAPH = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a node type that is a subgraph's id
GROUP = (
    "a group node, which only the browser can expand. Open the workflow in a current ComfyUI and save it again: that "
    "turns it into a subgraph"
)
MADE = "the browser makes when it sends the workflow"
# node types, and input types, whose pictures and sounds the page makes while it sends the workflow
RECORDERS = frozenset({"Load3D", "Load3DAnimation", "Load3DAdvanced", "WebcamCapture", "RecordAudio"})
RECORDED = frozenset({"LOAD_3D", "LOAD_3D_ANIMATION", "WEBCAM", "AUDIO_RECORD"})
RECORDING = f"whose images or sounds {MADE}"
# nodes that only the page uses: their packs register no such type on a server
OF_THE_PAGE_ALONE = (
    *("Label", "Bookmark", "Fast Muter", "Fast Bypasser", "Fast Groups Muter", "Fast Groups Bypasser"),
    *("Fast Actions Button", "Mute / Bypass Relay", "Mute / Bypass Repeater", "Random Unmuter"),
    *("Node Collector", "Node Combiner"),
)
# node types of cg-use-everywhere, whose links the page makes while it sends the workflow
BROADCASTERS = ("Seed Everywhere", "Prompts Everywhere", *(f"Anything Everywhere{more}" for more in ("", "3", "?")))
NEEDS_BROWSER = {  # node type -> why only the page can send it
    **{f"{name} (rgthree)": "which only the browser has" for name in OF_THE_PAGE_ALONE},
    **dict.fromkeys(RECORDERS, RECORDING),
    **dict.fromkeys(BROADCASTERS, f"whose links {MADE}"),
}
EXPORT_HINT = "In ComfyUI, use Workflow > Export (API) and run that file instead."


def types_in(workflow: Graph | Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """The node types whose schemas `graph_of` needs, and those whose schemas it uses where the host has them: also of
    nodes that do not run, where a file name may mean one. workflow: a graph, or its JSON in API or UI format. Raises
    WorkflowError where the workflow can't be read, has group nodes, or subgraphs that can't be unfolded."""
    if isinstance(workflow, Graph) or not is_ui_format(workflow):
        return graph_of(workflow, {}).class_types(), set()
    unfolded = _read(workflow)
    return _class_types(unfolded), types_named(unfolded)


def graph_of(workflow: Graph | Mapping[str, Any], schemas: Mapping[str, Schema]) -> Graph:
    """A workflow as a graph. schemas: by node type; at least those that it needs. Raises WorkflowError, as
    `convert` does."""
    if isinstance(workflow, Graph):
        return workflow
    return convert(workflow, schemas) if is_ui_format(workflow) else from_api(workflow)


def convert(
    data: Mapping[str, Any], schemas: Mapping[str, Schema], changed: Mapping[tuple[str, str], Any] | None = None
) -> Graph:
    """The graph that ComfyUI's page would send for this UI-format workflow. Nodes in subgraphs have ids like "1:2:3".

    data: the workflow. schemas: by node type; at least those that it needs. changed: by node and input, what file
    names have in place of what the workflow says. Raises WorkflowError where it can't be read or unfolded, or has a
    broken link table or an unknown node type.
    """
    unfolded = _read(data)
    missing = sorted(_class_types(unfolded) - set(schemas))
    if missing:
        raise UnknownNodesError(
            f"Cannot read the workflow: the host has no node type {listed(missing)}. Install its pack there. If only "
            f"the browser has it, like labels: {EXPORT_HINT}"
        )
    sources = Sources(unfolded, schemas)
    filled_in = filling_in(unfolded, schemas, sources.widgets, changed or {})
    converted: dict[str, GraphNode] = {}
    prompts: dict[tuple[str, str], str] = {}
    patterned: dict[tuple[str, str], str] = {}
    for level, node in unfolded.nodes():
        if not _runs(node):
            continue
        node_id, schema = f"{level.path}{node.id}", schemas[node.type]
        inputs = dict(sources.widgets.of(node))
        unnamed = [value for value in node.stored if value and isinstance(value, (dict, list))]
        if unnamed and not (schema.widgets or schema.is_output):  # output nodes store what they show
            what = f"a '{shown(node.type)}', with values whose names only the browser knows: {shown(unnamed[-1])}"
            raise _only_in_browser(level, node, what)
        in_widgets = set(inputs)  # inputs that the page sends as their widgets format them
        patterns = [PREFIX] if node.type in SAVERS else []  # inputs, once per pass of filling in their patterns
        for slot in node.inputs or ():
            found = sources.of(level, node, slot)
            if found is None:
                continue
            inputs[slot.name] = found.value
            (in_widgets.add if found.in_widget else in_widgets.discard)(slot.name)
            if found.has_patterns:
                patterns.append(slot.name)
        specs = schema.inputs_with(inputs)
        if any(spec.type in RECORDED and not isinstance(inputs.get(spec.name), Link) for spec in specs.values()):
            raise _only_in_browser(level, node, f"a '{shown(node.type)}', {RECORDING}")
        for name, text in inputs.items():
            if name not in in_widgets or not isinstance(text, str):
                continue
            for _ in range(patterns.count(name)):
                inputs[name] = filled_in(inputs[name])
            if name in patterns and "%" in text:
                patterned[node_id, name] = text
            if name in specs and specs[name].config.get("dynamicPrompts") is True:
                prompts[node_id, name] = inputs[name]
        converted[node_id] = whole(GraphNode(node_id, node.type, inputs, node.title or None, level.title))
    as_saved = json.loads(json.dumps(data), parse_constant=lambda _: None)  # null for NaN, which JSON does not have
    return chosen(Graph(converted, as_saved, prompts, patterned))


def with_changes(graph: Graph, changed: Iterable[tuple[str, str]], schemas: Mapping[str, Schema]) -> Graph:
    """Return the graph with the workflow that it came from changed like some of its inputs, for users who open that
    workflow from a result, and with file names for the current values. If the page cannot represent this, or another
    node shows a value, the workflow is left out: the page then opens the nodes as they ran.

    changed: (node, input) pairs. schemas: as for `convert`.
    """
    if graph.workflow is None:
        return graph
    given = {(node, name): graph.nodes[node].inputs.get(name) for node, name in changed}
    saved, has_all = with_widgets(graph.workflow, given, schemas)
    again = convert(saved, schemas, given)
    filled_in: dict[str, dict[str, Any]] = {}
    for node_id, name in graph.patterned:
        if node_id in again.nodes and name in again.nodes[node_id].inputs:
            filled_in.setdefault(node_id, {})[name] = again.nodes[node_id].inputs[name]
    graph = graph.with_inputs(filled_in)
    if has_all and {i: node.inputs for i, node in again.nodes.items()} == {i: n.inputs for i, n in graph.nodes.items()}:
        return replace(again, guarded=graph.guarded, workflow=saved)
    return replace(graph, workflow=None)


def _read(data: Mapping[str, Any]) -> Unfolded:
    try:
        return unfold(fitting(UiFile, data))
    except Unreadable as error:
        raise WorkflowError(f"This is not a workflow in ComfyUI's format: {error}. {EXPORT_HINT}") from None
    except WorkflowError as error:
        raise WorkflowError(f"{error} {EXPORT_HINT}") from None


def _class_types(unfolded: Unfolded) -> set[str]:
    types: set[str] = set()
    for level, node in unfolded.nodes():
        if node.type in unfolded.groups or node.type.startswith(("workflow/", "workflow>")):
            raise _only_in_browser(level, node, GROUP)
        if not _runs(node):
            continue
        if A_SUBGRAPH.fullmatch(node.type):
            raise _only_in_browser(level, node, "a subgraph that the file does not define")
        if node.type in NEEDS_BROWSER:
            raise _only_in_browser(level, node, f"a '{node.type}', {NEEDS_BROWSER[node.type]}")
        types.add(node.type)
    return types


def _only_in_browser(level: Level, node: UiNode, what: str) -> WorkflowError:
    return WorkflowError(f"Node {shown(level.path + node.id)} is {what}. {EXPORT_HINT}")


def _runs(node: UiNode) -> bool:
    return node.mode not in (MUTED, BYPASSED) and node.type not in FRONTEND_ONLY
