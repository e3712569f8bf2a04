"""A workflow as a graph of nodes, values and links, read from API-format JSON and written back to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pydantic import AliasPath, Field, JsonValue

from ...trust.foreign import Foreign, Unreadable, fitting, object_in, read
from ...trust.message import is_whole, listed, shown
from ..errors import NodeNotFoundError, WorkflowError

DATE = "%date:"


@dataclass(frozen=True)
class Link:
    """The source of a linked input."""

    node: str  # id of the source node
    slot: int  # number of its output, from 0


@dataclass(frozen=True)
class GraphNode:
    id: str
    class_type: str
    inputs: Mapping[str, Any]  # name -> Link or plain value
    title: str | None = None
    subgraph: str | None = None  # title of the subgraph that contains it, if any

    @property
    def label(self) -> str:
        """The node's name in messages: id and title."""
        named = f"node {shown(self.id)} ({shown(self.title or self.class_type)})"
        return f"{named} in '{shown(self.subgraph)}'" if self.subgraph else named

    def links(self) -> dict[str, Link]:
        return {name: value for name, value in self.inputs.items() if isinstance(value, Link)}


@dataclass(frozen=True)
class Graph:
    nodes: Mapping[str, GraphNode]
    workflow: Mapping[str, Any] | None = field(default=None, repr=False)  # the UI-format JSON it came from
    # by node and input, as the UI-format JSON has them: texts with choices, and file names with patterns
    prompts: Mapping[tuple[str, str], str] = field(default_factory=dict, repr=False)
    patterned: Mapping[tuple[str, str], str] = field(default_factory=dict, repr=False)
    guarded: bool = False  # ask the server to guard it, as its setting 'Guard every workflow' does

    def class_types(self) -> set[str]:
        return {node.class_type for node in self.nodes.values()}

    def to_api(self) -> dict[str, dict[str, Any]]:
        """Return the `prompt` object of ComfyUI's `POST /prompt`."""
        return {node.id: _node_to_api(node) for node in self.nodes.values()}

    def find(self, name: str) -> GraphNode:
        """Return the node of an id, or of a unique title or class id. Raises NodeNotFoundError if there is none,
        WorkflowError if there are several."""
        if name in self.nodes:
            return self.nodes[name]
        for key in (lambda n: n.title, lambda n: n.class_type):
            found = [node for node in self.nodes.values() if key(node) == name]
            if len(found) == 1:
                return found[0]
            if found:
                ids = listed(node.id for node in found)
                raise WorkflowError(
                    f"'{shown(name)}' names {len(found)} nodes of the workflow ({ids}): use the node's id."
                )
        inside = [node for node in self.nodes.values() if node.id.startswith(f"{name}:")]  # of a subgraph node
        known = listed(
            (f"{node.id} ({node.title or node.class_type})" for node in inside or self.nodes.values()), most=30
        )
        raise NodeNotFoundError(f"The workflow has no node '{shown(name)}'. Its nodes: {known}.")

    def without_dates(self) -> Graph:
        """Return a copy whose file names do not depend on the date."""
        dated = {place: text for place, text in self.patterned.items() if DATE in text}
        return self.with_inputs({node: {name: text} for (node, name), text in dated.items()})

    def with_inputs(self, values: Mapping[str, Mapping[str, Any]]) -> Graph:
        """Return a copy with other input values: id → name → value."""
        nodes = dict(self.nodes)
        for node_id, changed in values.items():
            nodes[node_id] = replace(nodes[node_id], inputs={**nodes[node_id].inputs, **changed})
        return replace(self, nodes=nodes)

    def order_for(self, targets: Iterable[str]) -> list[str]:
        """Return the ids of `targets` and all their sources, each after its own sources. Raises WorkflowError if a link
        goes to a missing node, or links form a cycle."""
        wanted: dict[str, set[str]] = {}
        queue = list(targets)
        while queue:
            node = self.nodes[queue.pop()]
            if node.id in wanted:
                continue
            for name, link in node.links().items():
                if link.node not in self.nodes:
                    raise WorkflowError(
                        f"{node.label}: input '{shown(name)}' is linked to node {shown(link.node)}, "
                        "which is not in the workflow."
                    )
            wanted[node.id] = {link.node for link in node.links().values()}
            queue.extend(wanted[node.id])
        try:
            return list(TopologicalSorter(wanted).static_order())
        except CycleError as error:
            circle = listed((self.nodes[i].label for i in error.args[1]), between=" -> ", limit=150)
            raise WorkflowError(f"The workflow's links form a cycle: {circle}. Remove one of them.") from None


class ApiNode(Foreign):
    class_type: str
    inputs: dict[str, JsonValue] = {}
    title: str | None = Field(default=None, validation_alias=AliasPath("_meta", "title"))


def read_json(path: Path) -> Mapping[str, Any]:
    """Read the JSON object of a workflow file. NaN and Infinity, which ComfyUI writes into pictures, are accepted here.
    Raises WorkflowError if there is no such file, or it is not a JSON object."""
    try:
        return object_in(read(path, nan=True))
    except OSError as error:
        raise WorkflowError(f"Cannot read the workflow {path}: {error.strerror or error}.") from error
    except Unreadable as error:
        raise WorkflowError(f"{path} is not a workflow: {error}.") from None


def is_ui_format(data: Mapping[str, Any]) -> bool:
    """Return whether this is the format of ComfyUI's Save, and not of Export (API)."""
    return isinstance(data.get("nodes"), list)


def from_api(data: Mapping[str, Any]) -> Graph:
    """Read a graph from API-format JSON, or from a whole body of `POST /prompt`. Raises WorkflowError if it is not in
    API format."""
    prompt = data.get("prompt")
    if isinstance(prompt, dict) and "class_type" not in prompt:
        data = prompt
    if not data:
        raise WorkflowError("The workflow is empty.")
    try:
        nodes = fitting(dict[str, ApiNode], data)
    except Unreadable as error:
        raise WorkflowError(
            f"This is not a workflow in API format: {error}. In ComfyUI, use Workflow > Export (API)."
        ) from None
    read: dict[str, GraphNode] = {}
    for node_id, node in nodes.items():
        inputs = {name: from_json(value) for name, value in node.inputs.items()}
        read[node_id] = whole(GraphNode(node_id, node.class_type, inputs, node.title))
    return Graph(read)


def from_json(value: JsonValue) -> Any:
    """Convert an input's JSON value: a link, or a plain value. ComfyUI wraps values that look like links."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return Link(value[0], value[1])
    if isinstance(value, dict) and set(value) == {"__value__"}:
        return value["__value__"]
    return value


def whole(node: GraphNode) -> GraphNode:
    """Return the node. Raises WorkflowError if one of its texts has a lone surrogate, which cannot be encoded."""
    for name, value in node.inputs.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
        if isinstance(text, str) and not is_whole(text):
            raise WorkflowError(
                f"{node.label}: input '{shown(name)}' holds half a character, as from a cut-off emoji: "
                f"{shown(value)}. Delete it, or type the emoji again."
            )
    return node


def _node_to_api(node: GraphNode) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Link):
            return [value.node, value.slot]
        return {"__value__": value} if isinstance(value, list) else value

    api: dict[str, Any] = {"class_type": node.class_type, "inputs": {k: plain(v) for k, v in node.inputs.items()}}
    if node.title:
        api["_meta"] = {"title": node.title}
    return api
