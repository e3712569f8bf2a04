"""`--set NODE.INPUT=VALUE`: changes one input of a workflow from the command line."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from ...trust.foreign import Unreadable, fitting, parse
from ...trust.message import is_whole, listed, shown
from ..errors import NodeNotFoundError, WorkflowError
from .graph import Graph, GraphNode, Link, from_json, whole
from .schema import NOTHING, InputSpec, Schema, walk
from .ui_format import with_changes
from .ui_texts import chosen

JSON: Any = JsonValue
BOOLEAN = TypeAdapter(bool)
MAX_PARTS = 10  # most dotted parts of an input's name


@dataclass(frozen=True)
class Setting:
    node: str  # id, or a unique title or class id
    input: str  # its name, or the end of a name with dots; the rest is in `node`
    text: str  # the value as typed

    @classmethod
    def parse(cls, argument: str) -> Setting:
        """Parse `NODE.INPUT=VALUE`, as UTF-8 in every locale. Both names may contain dots. Raises WorkflowError if it
        has another form, or is not UTF-8."""
        try:
            if not is_whole(argument):  # in an ASCII locale, Python escapes all other bytes
                argument = os.fsencode(argument).decode()
        except UnicodeError:
            raise WorkflowError(f"--set {shown(argument)}: expected UTF-8, found other bytes.") from None
        target, equals, text = argument.partition("=")
        node, dot, name = target.rpartition(".")
        if not (equals and dot and node and name):
            raise WorkflowError(f"--set {shown(argument)}: expected NODE.INPUT=VALUE, for example --set 4.steps=20.")
        return cls(node.strip(), name.strip(), text)

    def found_in(self, graph: Graph, schemas: Mapping[str, Schema]) -> tuple[GraphNode, InputSpec]:
        """Return the node and the input. Raises WorkflowError if there is no such node, or it has no such input."""
        parts = f"{self.node}.{self.input}".split(".")
        missing: list[NodeNotFoundError] = []
        for end in range(len(parts) - 1, max(len(parts) - 1 - MAX_PARTS, 0), -1):
            try:
                node = graph.find(".".join(parts[:end]))
            except NodeNotFoundError as error:
                missing.append(error)
                continue
            name, specs = ".".join(parts[end:]), schemas[node.class_type].inputs_with(node.inputs)
            if name in specs:
                return node, specs[name]
            raise WorkflowError(
                f"--set {shown('.'.join(parts))}: {node.label} has no input '{shown(name)}'. "
                f"Its inputs: {listed(specs, most=50) or 'none'}."
            )
        raise missing[0]

    def depth_in(self, graph: Graph, schemas: Mapping[str, Schema]) -> float:
        """Return how many inputs enable this one; infinite if another setting has to come first."""
        try:
            return self.found_in(graph, schemas)[1].name.count(".")
        except WorkflowError:
            return math.inf


def apply(
    graph: Graph, settings: Iterable[Setting], schemas: Mapping[str, Schema], before: Iterable[Setting] = ()
) -> Graph:
    """Return the graph with these inputs changed, and its prompts' choices made by the resulting seeds. Later settings
    win, but a setting that enables an input is applied before that input's.

    before: settings that are all applied first.

    Raises WorkflowError if there is no such node or input, or a value cannot be encoded.
    """
    prompts, patterned = dict(graph.prompts), dict(graph.patterned)
    changed_inputs: dict[tuple[str, str], None] = {}  # in order
    for setting in chain.from_iterable(
        sorted(some, key=lambda each: each.depth_in(graph, schemas)) for some in (before, settings)
    ):
        node, spec = setting.found_in(graph, schemas)
        value = _value(setting.text, spec)
        changed = {**node.inputs, spec.name: value}
        if spec.brings and value != node.inputs.get(spec.name):
            changed = _brought(changed, spec, schemas[node.class_type])
        graph = replace(graph, nodes={**graph.nodes, node.id: whole(replace(node, inputs=changed))})
        new = (name for name in changed if changed[name] != node.inputs.get(name, NOTHING))
        changed_inputs |= dict.fromkeys((node.id, name) for name in new)
        for texts in (prompts, patterned):
            texts.pop((node.id, spec.name), None)
    made = chosen(replace(graph, prompts=prompts, patterned=patterned))
    return with_changes(made, changed_inputs, schemas) if changed_inputs else made


def _brought(values: Mapping[str, Any], spec: InputSpec, schema: Schema) -> dict[str, Any]:
    """Return the inputs that an option enables, as on the page: with their defaults; links stay if they fit."""
    prefix = f"{spec.name}."
    left = {name: value for name, value in values.items() if not name.startswith(prefix)}
    for each in walk(schema.inputs.values(), lambda each: left.get(each.name)):
        value = values.get(each.name)
        if each.name.startswith(prefix) and (isinstance(value, Link) or each.default is not NOTHING):
            left[each.name] = value if isinstance(value, Link) else each.default
    return left


def _value(text: str, spec: InputSpec) -> object:
    """Return the text parsed as JSON if it is JSON, else itself. A prompt of `1e3` or `[1, 2]` stays text, and
    so does an option that is named `2024`."""
    try:
        value = fitting(JSON, parse(text))
    except Unreadable:
        value = text
    if spec.type == "BOOLEAN" and isinstance(value, str):  # ComfyUI treats any text as true
        try:
            return BOOLEAN.validate_python(value)
        except ValidationError:
            raise WorkflowError(f"--set {spec.name}={shown(text)}: expected true or false.") from None
    if spec.type == "STRING" and spec.widget and not isinstance(value, str):
        return text
    if spec.type == "COMBO" and not isinstance(value, (dict, list)) and value not in spec.options:
        return value if isinstance(value, str) else text  # an option may be named "2024" or "true"
    return from_json(value)
