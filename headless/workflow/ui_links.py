"""What an input of a UI-format workflow gets in the end, through all that the page resolves itself.

Reroutes, primitives and bypassed nodes hand on what they get, subgraph nodes what is in them or outside of them. What
a subgraph node shows as widgets of its own stands in the place of the inner nodes' values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...trust.text import shown
from ..errors import WorkflowError
from .graph import Link
from .schema import NOTHING, Schema
from .subgraphs import BYPASSED, INPUTS, MUTED, Canvas, Level, Unfolded
from .ui_file import UiInput, UiNode, UiPort
from .ui_widgets import widget_values

REROUTE, PRIMITIVE = "Reroute", "PrimitiveNode"
COMPARED = 100  # inputs of a bypassed node; no real one has as many
ANY = frozenset({"*", "", "0"})


@dataclass(frozen=True)
class Found:
    """What an input gets: a link to a node's output, or a plain value."""

    value: Any


@dataclass(frozen=True)
class _Step:
    """A link, on its canvas in its place."""

    level: Level
    link: str

    @property
    def key(self) -> tuple[str, str]:
        return self.level.path, self.link


class Sources:
    """Each link is followed once."""

    def __init__(self, unfolded: Unfolded, schemas: Mapping[str, Schema]) -> None:
        self.unfolded = unfolded
        self.shown = _Shown(unfolded, schemas)
        self.found: dict[tuple[str, str], Found | None] = {}
        self.first: dict[int, dict[str, UiInput]] = {}  # by bypassed node and type, its first input

    def of(self, level: Level, node: UiNode, slot: UiInput) -> Found | None:
        """What the input of a node gets, or None where nothing feeds it.

        Raises:
            WorkflowError: it leads nowhere, or in a circle.
        """
        at = self._behind(level, node, slot)
        way: dict[tuple[str, str], None] = {}
        while isinstance(at, _Step) and at.key not in self.found:
            if at.key in way:
                raise WorkflowError(
                    "The workflow's reroutes, bypassed nodes or subgraphs run in a circle at link "
                    f"{shown(at.level.path + at.link)}. Cut it."
                )
            way[at.key] = None
            at = self._upstream(at)
        found = self.found[at.key] if isinstance(at, _Step) else at
        self.found |= dict.fromkeys(way, found)
        return found

    def _behind(self, level: Level, node: UiNode, slot: UiInput | None) -> _Step | Found | None:
        if slot is None:
            return None
        if level.node is not None:
            value = self.shown.of(level.node).inner.get((node.id, slot.name), NOTHING)
            if value is not NOTHING:
                return Found(value)
        return _Step(level, slot.link) if slot.link is not None else None

    def _upstream(self, step: _Step) -> _Step | Found | None:
        """Where the page would go on, else where it ends."""
        level, canvas = step.level, step.level.canvas
        link = canvas.links.get(step.link)
        if link is not None and link.origin_id == INPUTS and level.above is not None and level.node is not None:
            return self._outside(level.above, level.node, canvas, link.origin_slot)
        if link is None or link.origin_id not in canvas.nodes:
            raise WorkflowError(f"Link {shown(level.path + step.link)} of the workflow leads nowhere.")
        node = canvas.nodes[link.origin_id]
        if node.type == PRIMITIVE:
            return self._primitive(step, node)
        if node.mode == MUTED:
            return None
        if node.mode == BYPASSED and node.type != REROUTE:
            slot = self._bypass(step, node, link.origin_slot)
            return self._behind(level, node, slot)
        if node.type in self.unfolded.subgraphs:
            inside = self.unfolded.levels[f"{level.path}{node.id}:"]
            within = inside.canvas.link_to_output(link.origin_slot)
            return None if within is None else _Step(inside, within)
        if node.type == REROUTE:
            return self._behind(level, node, node.inputs[0] if node.inputs else None)
        return Found(Link(f"{level.path}{node.id}", link.origin_slot))

    def _outside(self, level: Level, node: UiNode, canvas: Canvas, place: int) -> _Step | Found | None:
        """What comes into a subgraph."""
        host = self.shown.of(node)
        if not 0 <= place < len(canvas.inputs):
            raise WorkflowError(
                f"A link takes input {shown(place)} of the subgraph '{shown(canvas.name)}', "
                f"which has {len(canvas.inputs)}."
            )
        at = self._behind(level, node, host.slots.get(canvas.inputs[place].name))
        if at is not None or host.values[place] is NOTHING:
            return at
        return Found(host.values[place])

    def _primitive(self, step: _Step, node: UiNode) -> Found | None:
        """The value of a primitive, which the page hands to the node beside it, and to none further on."""
        level = step.level
        target, _ = level.canvas.targets.get(step.link, (None, None))
        if target is None or target.type == REROUTE or target.type in self.unfolded.subgraphs:
            return None
        values = node.widgets_values
        value = values[0] if isinstance(values, list) and values else None
        return Found(self.shown.of(level.node).inner.get((node.id, ""), value) if level.node else value)

    def _bypass(self, step: _Step, node: UiNode, slot: int) -> UiInput | None:
        """The input that stands in for an output of a bypassed node: that of the same place, else of the type."""
        inputs, outputs = node.inputs or [], node.outputs or []
        if not 0 <= slot < len(outputs):
            raise WorkflowError(
                f"A link takes output {shown(slot)} of node {shown(step.level.path + node.id)}, "
                f"which has {len(outputs)}."
            )
        given = outputs[slot].type
        wanted = self._wanted(step)
        if wanted in ANY:
            return inputs[slot if slot < len(inputs) else 0] if inputs else None
        if slot < len(inputs) and _connects(inputs[slot].type, given) and _connects(inputs[slot].type, wanted):
            return inputs[slot]
        if id(node) not in self.first:
            self.first[id(node)] = {each.type: each for each in reversed(inputs)}
        few = inputs[:COMPARED]
        fitting = (each for each in few if _connects(each.type, given) and _connects(each.type, wanted))
        return self.first[id(node)].get(wanted) or next(fitting, None)

    def _wanted(self, step: _Step) -> str:
        """The type of the input that a link leads to; of the link itself where that only hands it on."""
        node, slot = step.level.canvas.targets.get(step.link, (None, None))
        if node is None or slot is None or node.type == REROUTE:
            return step.level.canvas.links[step.link].type
        return slot.type


def _connects(one: str, other: str) -> bool:
    if one in ANY or other in ANY:
        return True
    return not set(one.lower().split(",")).isdisjoint(other.lower().split(","))


@dataclass(frozen=True)
class _Host:
    """A subgraph node."""

    slots: Mapping[str, UiInput]
    values: list[Any]  # of its inputs, in their order; NOTHING for those that are no widgets
    inner: Mapping[tuple[str, str], Any]  # values of inputs of nodes in it, or of primitives ("")


class _Shown:
    """What subgraph nodes show as their own widgets."""

    def __init__(self, unfolded: Unfolded, schemas: Mapping[str, Schema]) -> None:
        self.subgraphs = unfolded.subgraphs
        self.schemas = schemas
        self.hosts: dict[int, _Host] = {}
        self.own: dict[int, dict[str, Any]] = {}

    def of(self, node: UiNode) -> _Host:
        if id(node) not in self.hosts:
            self.hosts[id(node)] = self._host(node, self.subgraphs[node.type])
        return self.hosts[id(node)]

    def _host(self, node: UiNode, canvas: Canvas) -> _Host:
        stored = node.widgets_values if isinstance(node.widgets_values, list) else []
        values, sources = [], {}
        for place, port in enumerate(canvas.inputs):
            value, source = self._first(canvas, port)
            values.append(value)
            sources.setdefault(source, place)
        widgets = [place for place, value in enumerate(values) if value is not NOTHING]
        for place, value in zip(widgets, stored, strict=False):
            values[place] = value
        inner: dict[tuple[str, str], Any] = {}
        for (inner_id, name, *_), value in zip(node.promoted, stored, strict=False):
            if value is None:
                continue
            inner_id = canvas.renamed.get(inner_id, inner_id)
            place = sources.get((inner_id, name)) if inner_id != "-1" else canvas.places.get(name)
            if place is not None:
                values[place] = value
            elif inner_id in canvas.nodes:
                at = self._input_of(canvas.nodes[inner_id], name)
                if at is not None:
                    inner[inner_id, at] = value
        return _Host({slot.name: slot for slot in node.inputs or ()}, values, inner)

    def _first(self, canvas: Canvas, port: UiPort) -> tuple[Any, tuple[str, str] | None]:
        """The value of the first widget that an input leads to, and which that is: id of its node and name."""
        source = None
        for link in port.links or ():
            if link in canvas.links and link in canvas.targets:
                node, slot = canvas.targets[link]
                value = self._value(node, slot)
                if node.type in self.subgraphs or value is not NOTHING:
                    source = source or (node.id, slot.name)
                if value is not NOTHING:
                    return value, source
        return NOTHING, source

    def _value(self, node: UiNode, slot: UiInput) -> Any:
        if node.type in self.subgraphs:
            place = self.subgraphs[node.type].places.get(slot.name)
            return NOTHING if place is None else self.of(node).values[place]
        if id(node) not in self.own:
            schema = self.schemas.get(node.type)
            self.own[id(node)] = widget_values(node, schema) if schema else {}
        return self.own[id(node)].get(slot.name, NOTHING)

    def _input_of(self, node: UiNode, name: str) -> str | None:
        """The input that belongs to a widget of an inner node; "" for a primitive."""
        if node.type == PRIMITIVE:
            return ""
        for slot in node.inputs or ():
            if slot.name == name and self._value(node, slot) is not NOTHING:
                return name
        return None
