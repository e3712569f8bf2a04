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

PRIMITIVE, SETTER, GETTER = "PrimitiveNode", "SetNode", "GetNode"  # the page's own, and two of KJNodes
REROUTES = frozenset({"Reroute", "Reroute (rgthree)"})
HANDS_ON = REROUTES | {SETTER}  # what their first input gets
COMPARED = 100  # inputs of a bypassed node; no real one has as many
ANY = frozenset({"*", "", "0"})


@dataclass(frozen=True)
class Found:
    """What an input gets: a link to a node's output, or a plain value."""

    value: Any
    in_widget: bool = False  # whether the page puts it into the input's own widget, and sends what that makes of it
    has_patterns: bool = False  # whether it fills in the value's %patterns% first


@dataclass(frozen=True)
class _Step:
    """A link, on its canvas in its place."""

    level: Level
    link: str

    @property
    def key(self) -> tuple[str, str]:
        return self.level.path, self.link

    @property
    def wanted(self) -> str | None:
        """The type that is asked for here; None where the node that it leads to asks for what it is asked for."""
        node, slot = self.level.canvas.targets.get(self.link, (None, None))
        return None if node is None or slot is None or node.type in HANDS_ON else slot.type


class Sources:
    """Each link is followed once, and one from a bypassed node once for each type that is asked for behind it."""

    def __init__(self, unfolded: Unfolded, schemas: Mapping[str, Schema]) -> None:
        self.unfolded = unfolded
        self.shown = Shown(unfolded, schemas)
        # by link: where it leads, or at which link from a bypassed node that hangs on the type, and which is asked for
        self.straight: dict[tuple[str, str], tuple[_Step | Found | None, str | None]] = {}
        self.found: dict[tuple[tuple[str, str], str], Found | None] = {}  # by link from a bypassed node, and type
        self.first: dict[int, dict[str, UiInput]] = {}  # by bypassed node and type, its first input
        self.setters: dict[int, dict[str, list[UiNode]]] = {}  # by canvas and name

    def of(self, level: Level, node: UiNode, slot: UiInput) -> Found | None:
        """What the input of a node gets, or None where nothing feeds it.

        Raises:
            WorkflowError: it leads nowhere, or in a circle.
        """
        at = self._behind(level, node, slot)
        way: dict[tuple[tuple[str, str], str], None] = {}
        while isinstance(at, _Step):
            at, wanted = self._through(at, slot.type)
            if not isinstance(at, _Step):
                break
            asked = at.key, wanted
            if asked in self.found:
                at = self.found[asked]
                break
            if asked in way:
                raise _circle(at)
            way[asked] = None
            canvas = at.level.canvas
            bypassed = canvas.nodes[canvas.links[at.link].origin_id]
            at = self._behind(at.level, bypassed, self._bypass(at, bypassed, wanted))
        self.found |= dict.fromkeys(way, at)
        return at

    def _through(self, at: _Step, wanted: str) -> tuple[_Step | Found | None, str]:
        """Past all that hands on one input whatever is asked for."""
        way: dict[tuple[str, str], _Step] = {}
        end: _Step | Found | None = at
        while isinstance(end, _Step) and end.key not in self.straight:
            if end.key in way:
                raise _circle(end)
            way[end.key] = end
            following = self._upstream(end)
            if following is end:
                break
            end = following
        known = self.straight.get(end.key) if isinstance(end, _Step) else None
        end, asked = known or (end, None)
        for step in reversed(way.values()):
            asked = step.wanted if asked is None else asked
            self.straight[step.key] = end, asked
        return end, wanted if asked is None else asked

    def _behind(self, level: Level, node: UiNode, slot: UiInput | None) -> _Step | Found | None:
        if slot is None:
            return None
        if level.node is not None:
            value = self.shown.of(level.node).inner.get((node.id, slot.name), NOTHING)
            if value is not NOTHING:
                return Found(value)
        return _Step(level, slot.link) if slot.link is not None else None

    def _upstream(self, step: _Step) -> _Step | Found | None:
        """Where the page would go on, else where it ends; the same step where that hangs on what is asked for."""
        level, canvas = step.level, step.level.canvas
        link = canvas.links.get(step.link)
        if link is not None and link.origin_id == INPUTS and level.above is not None and level.node is not None:
            return self._outside(level.above, level.node, canvas, link.origin_slot)
        if link is None or link.origin_id not in canvas.nodes:
            raise WorkflowError(f"Link {shown(level.path + step.link)} of the workflow leads nowhere.")
        node = canvas.nodes[link.origin_id]
        if node.type == PRIMITIVE:
            return self._primitive(step, node)
        if node.mode == MUTED or (node.mode == BYPASSED and node.type == GETTER):
            return None
        if node.type in HANDS_ON:
            return self._behind(level, node, node.inputs[0] if node.inputs else None)
        if node.type == GETTER:
            return self._got(level, node)
        if node.mode == BYPASSED:
            return step
        if node.type in self.unfolded.subgraphs:
            inside = self.unfolded.levels[f"{level.path}{node.id}:"]
            within = inside.canvas.link_to_output(link.origin_slot)
            return None if within is None else _Step(inside, within)
        return Found(Link(f"{level.path}{node.id}", link.origin_slot))

    def _got(self, level: Level, node: UiNode) -> _Step | Found | None:
        """What a Get node gets: what the Set node of its name does, on its canvas, else on one around that."""
        found, around = self._named(level, node.first_value), level.above
        is_outside = not found
        while is_outside and around is not None:
            found, around = [*found, *self._named(around, node.first_value)], around.above
        if len(found) > 1:
            raise WorkflowError(
                f"Node {shown(level.path + node.id)} gets '{shown(node.first_value)}', which {len(found)} Set nodes "
                "set. Rename all but one of them, and save the workflow again."
            )
        if not found:
            return None
        at, setter = found[0]
        step = self._behind(at, setter, setter.inputs[0] if setter.inputs else None)
        link = at.canvas.links.get(step.link) if isinstance(step, _Step) else None
        return None if is_outside and link is not None and link.origin_id == INPUTS else step  # as KJNodes has it

    def _named(self, level: Level, name: Any) -> list[tuple[Level, UiNode]]:
        """The Set nodes of this name on a canvas."""
        canvas = level.canvas
        if id(canvas) not in self.setters:
            named = self.setters[id(canvas)] = {}
            for node in canvas.nodes.values():
                if node.type == SETTER and isinstance(node.first_value, str) and node.first_value:
                    named.setdefault(node.first_value, []).append(node)
        found = self.setters[id(canvas)].get(name, ()) if isinstance(name, str) else ()
        return [(level, node) for node in found]

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
        if target is None or target.mode == BYPASSED or target.type in HANDS_ON | self.unfolded.subgraphs.keys():
            return None
        value = node.first_value
        value = self.shown.of(level.node).inner.get((node.id, ""), value) if level.node else value
        return Found(value, in_widget=True, has_patterns=node.fills_in_patterns)

    def _bypass(self, step: _Step, node: UiNode, wanted: str) -> UiInput | None:
        """The input that stands in for an output of a bypassed node: that of the same place, else of the type."""
        inputs, outputs = node.inputs or [], node.outputs or []
        slot = step.level.canvas.links[step.link].origin_slot
        if not 0 <= slot < len(outputs):
            raise WorkflowError(
                f"A link takes output {shown(slot)} of node {shown(step.level.path + node.id)}, "
                f"which has {len(outputs)}."
            )
        given = outputs[slot].type
        if wanted in ANY:
            return inputs[slot if slot < len(inputs) else 0] if inputs else None
        if slot < len(inputs) and _connects(inputs[slot].type, given) and _connects(inputs[slot].type, wanted):
            return inputs[slot]
        if id(node) not in self.first:
            self.first[id(node)] = {each.type: each for each in reversed(inputs)}
        few = inputs[:COMPARED]
        fitting = (each for each in few if _connects(each.type, given) and _connects(each.type, wanted))
        return self.first[id(node)].get(wanted) or next(fitting, None)


def _circle(at: _Step) -> WorkflowError:
    return WorkflowError(
        "The workflow's reroutes, Get nodes, bypassed nodes or subgraphs run in a circle at link "
        f"{shown(at.level.path + at.link)}. Cut it."
    )


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


class Shown:
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
