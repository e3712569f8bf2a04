"""`--set NODE.INPUT=VALUE`: one input of a workflow given another value from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from ..trust.foreign import Unreadable, fitting, parse
from ..trust.text import listed, shown
from .errors import WorkflowError
from .graph import Graph, from_json
from .schema import InputSpec, Schema

JSON: Any = JsonValue


@dataclass(frozen=True)
class Setting:
    node: str  # id, or a title or class id that is unique
    input: str
    text: str  # the value as it was typed

    @classmethod
    def parse(cls, argument: str) -> Setting:
        """Read `NODE.INPUT=VALUE`. A node's name may hold dots, an input's may not.

        Raises:
            WorkflowError: it has another form, or bytes that are no text.
        """
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise WorkflowError(f"--set {shown(argument)}: expected UTF-8, found bytes that are none.") from None
        target, equals, text = argument.partition("=")
        node, dot, name = target.rpartition(".")
        if not (equals and dot and node and name):
            raise WorkflowError(f"--set {shown(argument)}: expected NODE.INPUT=VALUE, for example --set 4.steps=20.")
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
                f"--set {shown(f'{setting.node}.{setting.input}')}: {node.label} has no input "
                f"'{shown(setting.input)}'. Its inputs: {listed(specs, most=50) or 'none'}."
            )
        graph = graph.with_input(node.id, setting.input, _value(setting.text, specs[setting.input]))
    return graph


def _value(text: str, spec: InputSpec) -> object:
    """The text read as JSON where it is JSON, else itself. A prompt of `1e3` or `[1, 2]` stays text."""
    try:
        value = fitting(JSON, parse(text))
    except Unreadable:
        return text
    if spec.type == "STRING" and spec.is_widget and not isinstance(value, str):
        return text
    return from_json(value)
