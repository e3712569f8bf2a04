"""A workflow as data: nodes, values and links, read from API-format JSON and written back to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from .errors import WorkflowError


@dataclass(frozen=True)
class Link:
    """Where a linked input gets its value from."""

    node: str  # id of the node that makes the value
    slot: int  # which of its outputs, from 0


@dataclass(frozen=True)
class Node:
    id: str
    class_type: str
    inputs: Mapping[str, Any]  # name -> Link or plain value
    title: str | None = None

    @property
    def label(self) -> str:
        """How messages name this node: id and title."""
        return f"node {self.id} ({self.title or self.class_type})"

    def links(self) -> dict[str, Link]:
        return {name: value for name, value in self.inputs.items() if isinstance(value, Link)}


@dataclass(frozen=True)
class Graph:
    nodes: Mapping[str, Node]
    workflow: Mapping[str, Any] | None = field(default=None, repr=False)  # the UI-format JSON it came from, if it did

    def class_types(self) -> set[str]:
        return {node.class_type for node in self.nodes.values()}

    def to_api(self) -> dict[str, dict[str, Any]]:
        """The `prompt` object that ComfyUI's `POST /prompt` takes."""
        return {node.id: _node_to_api(node) for node in self.nodes.values()}

    def find(self, name: str) -> Node:
        """The node that `name` means: an id, or a title or class id that only one node has.

        Raises:
            WorkflowError: no node, or more than one, goes by that name.
        """
        if name in self.nodes:
            return self.nodes[name]
        for key in (lambda n: n.title, lambda n: n.class_type):
            found = [node for node in self.nodes.values() if key(node) == name]
            if len(found) == 1:
                return found[0]
            if found:
                ids = ", ".join(node.id for node in found)
                raise WorkflowError(f"'{name}' names {len(found)} nodes of the workflow ({ids}): use the node's id.")
        known = ", ".join(f"{node.id} ({node.title or node.class_type})" for node in self.nodes.values())
        raise WorkflowError(f"The workflow has no node '{name}'. Its nodes: {known}.")

    def with_input(self, node_id: str, name: str, value: Any) -> Graph:
        """A copy in which one input has another value."""
        node = self.nodes[node_id]
        changed = replace(node, inputs={**node.inputs, name: value})
        return replace(self, nodes={**self.nodes, node_id: changed})

    def order_for(self, targets: Iterable[str]) -> list[str]:
        """Ids of `targets` and all that they hang on, each after what it takes its inputs from.

        Raises:
            WorkflowError: a link goes to a node that doesn't exist, or links run in a circle.
        """
        wanted: dict[str, set[str]] = {}
        queue = list(targets)
        while queue:
            node = self.nodes[queue.pop()]
            if node.id in wanted:
                continue
            sources = node.links()
            for name, link in sources.items():
                if link.node not in self.nodes:
                    raise WorkflowError(
                        f"{node.label}: input '{name}' is linked to node {link.node}, which is not in the workflow."
                    )
            wanted[node.id] = {link.node for link in sources.values()}
            queue.extend(wanted[node.id])
        try:
            return list(TopologicalSorter(wanted).static_order())
        except CycleError as error:
            circle = " -> ".join(self.nodes[i].label for i in error.args[1])
            raise WorkflowError(f"The workflow's links run in a circle: {circle}. Cut one of them.") from None


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a workflow file.

    Raises:
        WorkflowError: no such file, not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise WorkflowError(f"Cannot read the workflow {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise WorkflowError(f"{path} is not a workflow: it does not hold JSON ({error}).") from error
    if not isinstance(data, dict):
        raise WorkflowError(f"{path} is not a workflow: expected a JSON object, found a {type(data).__name__}.")
    return data


def is_ui_format(data: Mapping[str, Any]) -> bool:
    """Whether this is what ComfyUI's Save writes (and not Export (API))."""
    return isinstance(data.get("nodes"), list)


def from_api(data: Mapping[str, Any]) -> Graph:
    """A graph from API-format JSON, or from a whole body for `POST /prompt` that has it under `prompt`.

    Raises:
        WorkflowError: this isn't API format.
    """
    prompt = data.get("prompt")
    if isinstance(prompt, dict):
        data = prompt
    if not data:
        raise WorkflowError("The workflow is empty.")
    return Graph({str(key): _node_from_api(str(key), value) for key, value in data.items()})


def _node_from_api(node_id: str, data: Any) -> Node:
    if not isinstance(data, dict) or not isinstance(data.get("class_type"), str):
        raise WorkflowError(
            f"This is not a workflow in API format: '{node_id}' has no class_type. "
            "In ComfyUI, use Workflow > Export (API)."
        )
    inputs = data.get("inputs", {})
    if not isinstance(inputs, dict):
        raise WorkflowError(f"Node {node_id} ({data['class_type']}): 'inputs' is not an object.")
    title = (data.get("_meta") or {}).get("title")
    return Node(node_id, data["class_type"], {name: _value(value) for name, value in inputs.items()}, title)


def _value(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return Link(value[0], value[1])
    if isinstance(value, dict) and set(value) == {"__value__"}:
        return value["__value__"]
    return value


def _node_to_api(node: Node) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Link):
            return [value.node, value.slot]
        return {"__value__": value} if isinstance(value, list) else value

    api: dict[str, Any] = {"class_type": node.class_type, "inputs": {k: plain(v) for k, v in node.inputs.items()}}
    if node.title:
        api["_meta"] = {"title": node.title}
    return api
