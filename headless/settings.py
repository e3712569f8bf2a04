"""`--set NODE.INPUT=VALUE`: one input of a workflow given another value from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import WorkflowError
from .graph import Graph, Link
from .schema import InputSpec, Schema


@dataclass(frozen=True)
class Setting:
    node: str  # id, or a title or class id that is unique
    input: str
    text: str  # the value as it was typed

    @classmethod
    def parse(cls, argument: str) -> Setting:
        """Read `NODE.INPUT=VALUE`. A node's name may hold dots, an input's may not.

        Raises:
            WorkflowError: it has another form.
        """
        target, equals, text = argument.partition("=")
        node, dot, name = target.rpartition(".")
        if not (equals and dot and node and name):
            raise WorkflowError(f"--set {argument}: expected NODE.INPUT=VALUE, for example --set 4.steps=20.")
        return cls(node.strip(), name.strip(), text)


def apply(graph: Graph, settings: Iterable[Setting], schemas: Mapping[str, Schema]) -> Graph:
    """The graph with these inputs changed; later settings win.

    Raises:
        WorkflowError: no such node, or the node's type has no such input.
    """
    for setting in settings:
        node = graph.find(setting.node)
        specs = schemas[node.class_type].inputs
        if setting.input not in specs:
            raise WorkflowError(
                f"--set {setting.node}.{setting.input}: {node.label} has no input '{setting.input}'. "
                f"Its inputs: {', '.join(specs) or 'none'}."
            )
        graph = graph.with_input(node.id, setting.input, _value(setting.text, specs[setting.input]))
    return graph


def _value(text: str, spec: InputSpec) -> object:
    """The text read as JSON where it is JSON, else itself. A prompt of `1e3` or `[1, 2]` stays text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if spec.type == "STRING" and spec.is_widget and not isinstance(value, str):
        return text
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return Link(value[0], value[1])
    return value
