"""A workflow as data: nodes, values and links, read from API-format JSON and written back to it."""

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
    """Where a linked input gets its value from."""

    node: str  # id of the node that makes the value
    slot: int  # which of its outputs, from 0


@dataclass(frozen=True)
class GraphNode:
    id: str
    class_type: str
    inputs: Mapping[str, Any]  # name -> Link or plain value
    title: str | None = None
    subgraph: str | None = None  # title of the one that it is in, where it is in one

    @property
    def label(self) -> str:
        """How messages name this node: id and title."""
        named = f"node {shown(self.id)} ({shown(self.title or self.class_type)})"
        return f"{named} in '{shown(self.subgraph)}'" if self.subgraph else named

    def links(self) -> dict[str, Link]:
        return {name: value for name, value in self.inputs.items() if isinstance(value, Link)}


@dataclass(frozen=True)
class Graph:
    nodes: Mapping[str, GraphNode]
    workflow: Mapping[str, Any] | None = field(default=None, repr=False)  # the UI-format JSON it came from, if it did
    # by node and input, as the UI-format JSON has them: texts with choices, and file names with patterns
    prompts: Mapping[tuple[str, str], str] = field(default_factory=dict, repr=False)
    patterned: Mapping[tuple[str, str], str] = field(default_factory=dict, repr=False)
    guarded: bool = False  # a server is asked to guard it, as with its setting 'Guard every workflow'

    def class_types(self) -> set[str]:
        return {node.class_type for node in self.nodes.values()}

    def to_api(self) -> dict[str, dict[str, Any]]:
        """The `prompt` object that ComfyUI's `POST /prompt` takes."""
        return {node.id: _node_to_api(node) for node in self.nodes.values()}

    def find(self, name: str) -> GraphNode:
        """The node that `name` means: an id, or a title or class id that only one node has. Raises NodeNotFoundError
        where no node goes by that name, WorkflowError where more than one does."""
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
        """A copy whose file names are the same on every day."""
        dated = {place: text for place, text in self.patterned.items() if DATE in text}
        return self.with_inputs({node: {name: text} for (node, name), text in dated.items()})

    def with_inputs(self, values: Mapping[str, Mapping[str, Any]]) -> Graph:
        """A copy in which some nodes' inputs have other values: id -> name -> value."""
        nodes = dict(self.nodes)
        for node_id, changed in values.items():
            nodes[node_id] = replace(nodes[node_id], inputs={**nodes[node_id].inputs, **changed})
        return replace(self, nodes=nodes)

    def order_for(self, targets: Iterable[str]) -> list[str]:
        """Ids of `targets` and all that they hang on, each after what it takes its inputs from. Raises WorkflowError
        where a link goes to a node that doesn't exist, or links run in a circle."""
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
            raise WorkflowError(f"The workflow's links run in a circle: {circle}. Cut one of them.") from None


class ApiNode(Foreign):
    class_type: str
    inputs: dict[str, JsonValue] = {}
    title: str | None = Field(default=None, validation_alias=AliasPath("_meta", "title"))


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a workflow file. NaN and Infinity, which ComfyUI writes into pictures, are read: where they
    stand decides whether they matter. Raises WorkflowError: no such file, not JSON, or not an object."""
    try:
        return object_in(read(path, nan=True))
    except OSError as error:
        raise WorkflowError(f"Cannot read the workflow {path}: {error.strerror or error}.") from error
    except Unreadable as error:
        raise WorkflowError(f"{path} is not a workflow: {error}.") from None


def is_ui_format(data: Mapping[str, Any]) -> bool:
    """Whether this is what ComfyUI's Save writes (and not Export (API))."""
    return isinstance(data.get("nodes"), list)


def from_api(data: Mapping[str, Any]) -> Graph:
    """A graph from API-format JSON, or from a whole body for `POST /prompt` that has it under `prompt`. Raises
    WorkflowError where this isn't API format."""
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
    """An input's value as a workflow has it: a link, or plain; what could be taken for a link is wrapped."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return Link(value[0], value[1])
    if isinstance(value, dict) and set(value) == {"__value__"}:
        return value["__value__"]
    return value


def whole(node: GraphNode) -> GraphNode:
    """The node, all of whose texts can be sent and encoded. Raises WorkflowError where one holds half a character."""
    for name, value in node.inputs.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
        if isinstance(text, str) and not is_whole(text):
            raise WorkflowError(
                f"{node.label}: input '{shown(name)}' holds half a character, as a cut-off emoji leaves it: "
                f"{shown(value)}. Delete it, or write the emoji again."
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
