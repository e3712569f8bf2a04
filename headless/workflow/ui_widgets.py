"""What a node's widgets hold: a UI-format file has their values by position, in the order of the node's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .schema import NOTHING, InputSpec, Schema, walk
from .ui_file import UiNode

CONTROL_VALUES = frozenset({"fixed", "increment", "decrement", "randomize", "increment-wrap"})
CUSTOM_COMBO = "CustomCombo"  # whose widgets the page makes: the choice, its place, and each option
NOT_STORED = "IMAGECOMPARE"
PAGE_ONLY = frozenset({"videopreview"})  # in nodes that store their widgets by name: no input of the node
ALONG: Mapping[str, int] = {"BOUNDING_BOX": 4}  # numbers that the page stores after such a value: its sides once more


def widget_values(node: UiNode, schema: Schema) -> dict[str, Any]:
    """By input. Those that the file has no value for have their defaults, as on the page. Of a file that has them by
    name also those that the node type does not list: some packs make widgets as the choice in another asks for."""
    stored = node.widgets_values
    if node.type == CUSTOM_COMBO and isinstance(stored, list):
        names = ["choice", "index", *(f"option{number}" for number in range(1, len(stored)))]
        return dict(zip(names, stored, strict=False))
    values: dict[str, Any] = {}
    take: Callable[[InputSpec], Any]
    if isinstance(stored, dict):
        take = partial(_by_name, stored)
    else:
        take = _ByPosition(_without_forced(stored if isinstance(stored, list) else [], schema), schema)

    def value(spec: InputSpec) -> Any:
        found = take(spec) if spec.widget else NOTHING
        if found is not NOTHING:
            values[spec.name] = found
        return found

    known = {spec.name for spec in walk(schema.inputs.values(), value)}
    if isinstance(stored, dict):
        values |= {name: each for name, each in stored.items() if name not in known and not _is_page_only(name)}
    return values


def _by_name(stored: Mapping[str, Any], spec: InputSpec) -> Any:
    return stored.get(spec.name, spec.default)


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


class _ByPosition:
    def __init__(self, stored: list[Any], schema: Schema) -> None:
        self.stored = stored
        self.position = 0
        self.with_controls = len(stored) >= sum(1 + spec.may_have_control for spec in schema.widgets)

    def __call__(self, spec: InputSpec) -> Any:
        if spec.widget == NOT_STORED or self.position >= len(self.stored):
            return spec.default
        value = self.stored[self.position]
        self.position += 1 + ALONG.get(spec.widget or "", 0)
        if spec.may_have_control and self._next_is_control():
            self.position += 1
        return spec.default if value is None and spec.options else value

    def _next_is_control(self) -> bool:
        following = self.stored[self.position] if self.position < len(self.stored) else None
        if isinstance(following, bool):  # as files of 2023 have it
            return self.with_controls
        return isinstance(following, str) and following in CONTROL_VALUES
