"""What a node's widgets hold: a UI-format file has their values by position, in the order of the node's inputs.

A subgraph node shows widgets of nodes in it as its own. What it holds for them stands in the place of those nodes' own
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .schema import NOTHING, InputSpec, Schema, walk
from .ui_file import SETTER, Canvas, UiNode

CONTROL_VALUES = ("fixed", "increment", "decrement", "randomize", "increment-wrap")
CUSTOM_COMBO = "CustomCombo"  # whose widgets the page makes: the choice, its place, and each option
NOT_STORED = "IMAGECOMPARE"
PAGE_ONLY = frozenset({"videopreview"})  # in nodes that store their widgets by name: no input of the node
ALONG: Mapping[str, int] = {"BOUNDING_BOX": 4}  # numbers that the page stores after such a value: its sides once more
PRIMITIVE, GETTER = "PrimitiveNode", "GetNode"
OF_THE_PAGE = {  # node types that no server knows -> the name of their first widget
    PRIMITIVE: "value",
    "Note": "text",
    "MarkdownNote": "text",
    SETTER: "Constant",
    GETTER: "Constant",
}


def widget_values(node: UiNode, schema: Schema) -> dict[str, Any]:
    """By input. Those that the file has no value for have their defaults, as on the page. Of a file that has them by
    name also those that the node type does not list: some packs make widgets as the choice in another asks for."""
    stored = node.widgets_values
    if node.type == CUSTOM_COMBO and isinstance(stored, list):
        names = ["choice", "index", *(f"option{number}" for number in range(1, len(stored)))]
        return dict(zip(names, stored, strict=False))
    values: dict[str, Any] = {}
    by_name = isinstance(stored, dict)
    take = _by_name(stored) if by_name else _by_position(_without_forced(node.stored, schema), schema)
    known: set[str] = set()
    for spec in walk(schema.inputs.values(), lambda spec: values.get(spec.name)):
        known.add(spec.name)
        value = take(spec) if spec.widget else NOTHING
        if value is not NOTHING:
            values[spec.name] = value
    if by_name:
        values |= {name: each for name, each in stored.items() if name not in known and not _is_page_only(name)}
    return values


def _by_name(stored: Mapping[str, Any]) -> Callable[[InputSpec], Any]:
    return lambda spec: stored.get(spec.name, spec.default)


def _is_page_only(name: str) -> bool:
    return name in PAGE_ONLY or (name.startswith("choose ") and name.endswith(" to upload"))  # a button


def _without_forced(stored: list[Any], schema: Schema) -> list[Any]:
    """Without what files from before 2025 hold for inputs that are sockets alone: `migrateWidgetsValues` of the page,
    which knows such a file by how many values it has."""
    forced: list[bool] = []
    for spec in schema.inputs.values():
        if spec.widget or spec.forced:
            forced += [spec.forced] * (2 if spec.may_have_control else 1)
    if len(forced) != len(stored):
        return stored
    return [value for value, is_forced in zip(stored, forced, strict=True) if not is_forced]


def _by_position(stored: list[Any], schema: Schema) -> Callable[[InputSpec], Any]:
    left = stored[::-1]
    with_controls = len(stored) >= sum(1 + spec.may_have_control for spec in schema.widgets)

    def take(spec: InputSpec) -> Any:
        if spec.widget == NOT_STORED or not left:
            return spec.default
        value = left.pop()
        del left[max(len(left) - ALONG.get(spec.widget or "", 0), 0) :]
        if spec.may_have_control and left:
            in_2023 = isinstance(left[-1], bool)
            if with_controls if in_2023 else left[-1] in CONTROL_VALUES:
                left.pop()
        return spec.default if value is None and spec.options else value

    return take


class Widgets:
    """The widgets of all nodes of a file. schemas: by node type; of nodes without one no widget is known."""

    def __init__(self, subgraphs: Mapping[str, Canvas], schemas: Mapping[str, Schema]) -> None:
        self.subgraphs, self.schemas = subgraphs, schemas
        self._values: dict[int, dict[str, Any]] = {}  # by node
        self._shown: dict[int, dict[tuple[str, str], Any]] = {}  # by subgraph node

    def of(self, node: UiNode) -> Mapping[str, Any]:
        """What they hold, by name."""
        if id(node) not in self._values:
            self._values[id(node)] = {}  # for a subgraph that holds itself
            self._values[id(node)] = self._read(node)
        return self._values[id(node)]

    def shown_on(self, host: UiNode) -> Mapping[tuple[str, str], Any]:
        """What a subgraph node holds for widgets of nodes in it that are none of its inputs: by id and name."""
        self.of(host)
        return self._shown[id(host)]

    def _read(self, node: UiNode) -> dict[str, Any]:
        if node.type in self.subgraphs:
            values, self._shown[id(node)] = self._of_subgraph(node, self.subgraphs[node.type])
            return values
        if node.type in OF_THE_PAGE:
            return {OF_THE_PAGE[node.type]: node.first_value}
        return widget_values(node, self.schemas[node.type]) if node.type in self.schemas else {}

    def _of_subgraph(self, node: UiNode, canvas: Canvas) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
        values: dict[str, Any] = {}
        inputs: dict[tuple[str, str], str] = {}  # by the widget that each stands for
        for port in canvas.inputs:
            for inner, slot in (canvas.targets[link] for link in port.links or () if link in canvas.targets):
                value = self.of(inner).get(slot.name, NOTHING)
                if value is not NOTHING:
                    values[port.name] = value
                    inputs.setdefault((inner.id, slot.name), port.name)
                    break
        values |= dict(zip(values, node.stored, strict=False))
        shown: dict[tuple[str, str], Any] = {}
        for (inner_id, name, *_), value in zip(node.more.promoted or (), node.stored, strict=False):
            widget = canvas.renamed.get(inner_id, inner_id), name
            if value is None:
                continue
            if inner_id == "-1" or widget in inputs:
                values[inputs.get(widget, name)] = value
            else:
                shown[widget] = value
        return values, shown
