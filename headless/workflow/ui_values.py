"""The value of each input of a node in a UI-format workflow: from its widget, or from links that the page resolves.

A file stores widget values by position, in the order of the node's inputs. A subgraph node shows widgets of its inner
nodes as its own. Its values for these widgets replace the inner nodes' own values.

Reroutes, primitives and bypassed nodes pass on their inputs. Subgraph nodes pass values in and out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...trust.message import shown
from ..errors import WorkflowError
from .graph import Link
from .schema import NOTHING, InputSpec, Schema, walk
from .ui_file import BYPASSED, INPUTS, MUTED, SETTER, Canvas, Level, UiInput, UiNode, Unfolded

CONTROL_VALUES = ("fixed", "increment", "decrement", "randomize", "increment-wrap")
CUSTOM_COMBO = "CustomCombo"  # the page makes its widgets: the choice, its index, and each option
NOT_STORED = "IMAGECOMPARE"
PAGE_ONLY = frozenset({"videopreview"})  # widgets of nodes that store values by name; they are not inputs of the node
ALONG: Mapping[str, int] = {"BOUNDING_BOX": 4}  # extra numbers that the page stores after such a value: its sides again
PRIMITIVE, GETTER = "PrimitiveNode", "GetNode"
OF_THE_PAGE = {  # node types of the page only -> the name of their first widget
    PRIMITIVE: "value",
    "Note": "text",
    "MarkdownNote": "text",
    SETTER: "Constant",
    GETTER: "Constant",
}
REROUTES = frozenset({"Reroute", "Reroute (rgthree)"})
HANDS_ON = REROUTES | {SETTER}  # nodes that pass on their first input
MAX_COMPARED = 100  # most inputs of a bypassed node that are compared, if none has exactly the wanted type
ANY = frozenset({"*", "", "0"})


def widget_values(node: UiNode, schema: Schema) -> dict[str, Any]:
    """Return a node's widget values by input; missing ones are the defaults, as on the page. If the file stores values
    by name, values of unknown inputs are included: some packs create widgets depending on another widget's choice."""
    stored = node.widgets_values
    if node.type == CUSTOM_COMBO and isinstance(stored, list):
        names = ["choice", "index", *(f"option{number}" for number in range(1, len(stored)))]
        return dict(zip(names, stored, strict=False))
    values: dict[str, Any] = {}
    take = _by_position(_without_forced(node.stored, schema), schema)
    for spec in walk(schema.inputs.values(), lambda spec: values.get(spec.name)):
        value = NOTHING
        if spec.widget:
            value = stored.get(spec.name, spec.default) if isinstance(stored, dict) else take(spec)
        if value is not NOTHING:
            values[spec.name] = value
    if isinstance(stored, dict):
        known = schema.inputs_with(values)
        values |= {name: each for name, each in stored.items() if name not in known and not _is_page_only(name)}
    return values


def with_widgets(
    data: Mapping[str, Any], values: Mapping[tuple[str, str], Any], schemas: Mapping[str, Schema]
) -> tuple[dict[str, Any], bool]:
    """Return a copy of a UI-format workflow with other widget values, for nodes outside of subgraphs, and whether all
    values have a place in it. values: by node and input. Unchanged parts are shared with the original."""
    nodes = {str(node.get("id")): at for at, node in reversed([*enumerate(data["nodes"])])}
    made, has_all = [*data["nodes"]], True
    for (node_id, name), value in values.items():
        node = made[nodes[node_id]] if node_id in nodes else {}
        schema = schemas.get(node.get("type", ""))
        stored = _with_widget(node, schema, name, value) if schema else None
        if stored is None:
            has_all = False
        else:
            made[nodes[node_id]] = {**node, "widgets_values": stored}
    return {**data, "nodes": made}, has_all


def _with_widget(node: Mapping[str, Any], schema: Schema, name: str, value: Any) -> list[Any] | dict[str, Any] | None:
    """Return a node's stored values with one widget changed, at any position; None if it is not stored."""
    stored: Any = node.get("widgets_values")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # a link, or a value that JSON does not have
        return None

    def read(these: Any) -> dict[str, Any]:
        return widget_values(UiNode.model_validate({**node, "widgets_values": these}), schema)

    wanted = {**read(stored), name: value}
    if isinstance(stored, dict):
        places: list[Any] = [{**stored, name: value}]
    else:
        places = [[*stored[:place], value, *stored[place + 1 :]] for place in range(len(stored or ()))]
    return next((these for these in places if read(these) == wanted), None)


def _is_page_only(name: str) -> bool:
    return name in PAGE_ONLY or (name.startswith("choose ") and name.endswith(" to upload"))  # a button


def _without_forced(stored: list[Any], schema: Schema) -> list[Any]:
    """Drop values that files from before 2025 store for inputs that are only sockets: `migrateWidgetsValues` of the
    page, which recognises such a file by its number of values."""
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
    """The widgets of all nodes of a file. schemas: by node type; a node without a schema has no known widgets."""

    def __init__(self, subgraphs: Mapping[str, Canvas], schemas: Mapping[str, Schema]) -> None:
        self.subgraphs, self.schemas = subgraphs, schemas
        self._values: dict[int, dict[str, Any]] = {}  # by id(node)
        self._shown: dict[int, dict[tuple[str, str], Any]] = {}  # by id(subgraph node)

    def of(self, node: UiNode) -> Mapping[str, Any]:
        """Return a node's widget values, by name."""
        if id(node) not in self._values:
            self._values[id(node)] = {}  # ends the recursion of a subgraph that contains itself
            self._values[id(node)] = self._read(node)
        return self._values[id(node)]

    def shown_on(self, host: UiNode) -> Mapping[tuple[str, str], Any]:
        """Return a subgraph node's values for inner widgets that are none of its inputs, by node id and name."""
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
        inputs: dict[tuple[str, str], str] = {}  # inner widget -> the subgraph's input for it
        for port in canvas.inputs:
            for inner, slot in (canvas.targets[link] for link in port.links or () if link in canvas.targets):
                value = self.of(inner).get(slot.name, NOTHING)
                if value is not NOTHING:
                    values[port.name] = value
                    inputs.setdefault((inner.id, slot.name), port.name)
                    break
        values |= dict(zip(values, node.stored, strict=False))
        on_node: dict[tuple[str, str], Any] = {}
        for (inner_id, name, *_), value in zip(node.promoted or (), node.stored, strict=False):
            widget = canvas.renamed.get(inner_id, inner_id), name
            if value is None:
                continue
            if inner_id == "-1" or widget in inputs:
                values[inputs.get(widget, name)] = value
            else:
                on_node[widget] = value
        return values, on_node


@dataclass(frozen=True)
class InputValue:
    """The value of an input: a link to a node's output, or a plain value."""

    value: Any
    in_widget: bool = False  # whether the page puts it into the input's widget, and sends the widget's text
    has_patterns: bool = False  # whether the page fills in the value's %patterns% first


@dataclass(frozen=True)
class _Step:
    """A link on the way to an input's value."""

    level: Level
    link: str
    target: UiNode | None  # the node that it leads to; None for an output of a subgraph
    wanted: str  # the requested type

    @property
    def key(self) -> tuple[str, str, str]:
        return self.level.path, self.link, self.wanted


_Next = _Step | InputValue | None


class Sources:
    """Follows links upstream, each once per requested type."""

    def __init__(self, unfolded: Unfolded, schemas: Mapping[str, Schema]) -> None:
        self.unfolded = unfolded
        self.widgets = Widgets(unfolded.subgraphs, schemas)
        self.found: dict[tuple[str, str, str], InputValue | None] = {}  # results by `_Step.key`

    def of(self, level: Level, node: UiNode, slot: UiInput) -> InputValue | None:
        """Return the value of a node's input; None if nothing feeds it. Raises WorkflowError if the links lead nowhere,
        or form a cycle."""
        at = self._into(level, node, slot)
        way: set[tuple[str, str, str]] = set()
        while isinstance(at, _Step):
            if at.key in way:
                raise WorkflowError(
                    "The workflow's reroutes, Get nodes, bypassed nodes or subgraphs form a cycle at link "
                    f"{shown(at.level.path + at.link)}. Remove that link."
                )
            way.add(at.key)
            at = self.found[at.key] if at.key in self.found else self._upstream(at)
        self.found |= dict.fromkeys(way, at)
        return at

    def _into(self, level: Level, node: UiNode, slot: UiInput | None, wanted: str | None = None) -> _Next:
        """Return what feeds an input: a value that the subgraph node around it shows, or a link. wanted: the requested
        type, if it is not the input's own type."""
        if slot is None:
            return None
        if level.host:
            value = self.widgets.shown_on(level.host[1]).get((node.id, slot.name), NOTHING)
            if value is not NOTHING:
                return InputValue(value)
        if slot.link is None:
            return None
        return _Step(level, slot.link, node, slot.type if wanted is None else wanted)

    def _first_input(self, level: Level, node: UiNode, wanted: str) -> _Next:
        return self._into(level, node, node.inputs[0] if node.inputs else None, wanted)

    def _upstream(self, step: _Step) -> _Next:
        """Return the next link, as the page follows links, or the value."""
        level, canvas = step.level, step.level.canvas
        link = canvas.links.get(step.link)
        if link is not None and link.origin_id == INPUTS and level.host:
            return self._outside(*level.host, step, link.origin_slot)
        if link is None or link.origin_id not in canvas.nodes:
            raise WorkflowError(f"Link {shown(level.path + step.link)} of the workflow has no source node.")
        node = canvas.nodes[link.origin_id]
        if node.type == PRIMITIVE:
            return self._primitive(step, node)
        if node.mode == MUTED:
            return None
        if node.mode == BYPASSED:
            where = shown(level.path + node.id)
            return self._into(level, node, _stand_in(node, link.origin_slot, step.wanted, where))
        if node.type in HANDS_ON:
            return self._first_input(level, node, step.wanted)
        if node.type == GETTER:
            return self._got(step, node)
        if node.type in self.unfolded.subgraphs:
            inside = self.unfolded.levels[f"{level.path}{node.id}:"]
            outputs = inside.canvas.outputs
            links = outputs[link.origin_slot].links if 0 <= link.origin_slot < len(outputs) else None
            within = next((each for each in links or () if each in inside.canvas.links), None)
            return None if within is None else _Step(inside, within, None, step.wanted)
        return InputValue(Link(f"{level.path}{node.id}", link.origin_slot))

    def _outside(self, level: Level, node: UiNode, step: _Step, place: int) -> _Next:
        """Return what enters a subgraph: the link or value from outside, else its node's widget value."""
        canvas = step.level.canvas
        if not 0 <= place < len(canvas.inputs):
            raise WorkflowError(
                f"A link uses input {shown(place)} of the subgraph '{shown(canvas.name)}', which has "
                f"{len(canvas.inputs)} inputs."
            )
        name = canvas.inputs[place].name
        at = self._into(level, node, next((slot for slot in node.inputs or () if slot.name == name), None))
        value = self.widgets.of(node).get(name, NOTHING)
        return InputValue(value) if at is None and value is not NOTHING else at

    def _got(self, step: _Step, node: UiNode) -> _Next:
        """Return the input of the Set node with the same name, on the Get node's canvas, else on a canvas around it."""
        name, found = node.first_value, list[tuple[Level, UiNode]]()
        if not isinstance(name, str):
            return None
        for level in step.level.around():
            found += [(level, setter) for setter in level.canvas.setters.get(name, ())]
            if found and level is step.level:
                break
        if len(found) > 1:
            raise WorkflowError(
                f"Node {shown(step.level.path + node.id)} gets '{shown(name)}', but {len(found)} Set nodes set it. "
                "Rename all but one of them, and save the workflow again."
            )
        if not found:
            return None
        level, setter = found[0]
        into = self._first_input(level, setter, step.wanted)
        link = level.canvas.links.get(into.link) if isinstance(into, _Step) and level is not step.level else None
        return None if link and link.origin_id == INPUTS else into  # as KJNodes has it

    def _primitive(self, step: _Step, node: UiNode) -> InputValue | None:
        """Return the value of a primitive. The page gives it only to a directly linked node."""
        target = step.target
        if target is None or target.mode == BYPASSED or target.type in HANDS_ON | self.unfolded.subgraphs.keys():
            return None
        shown_on = self.widgets.shown_on(step.level.host[1]) if step.level.host else {}
        value = shown_on.get((node.id, "value"), node.first_value)
        return InputValue(value, in_widget=True, has_patterns=bool(node.fills_in))


def _stand_in(node: UiNode, output: int, wanted: str, where: str) -> UiInput | None:
    """Return the input that replaces a bypassed node's output: at the same position, else of the same type."""
    inputs, outputs = node.inputs or [], node.outputs or []
    if not 0 <= output < len(outputs):
        raise WorkflowError(f"A link uses output {shown(output)} of node {where}, which has {len(outputs)} outputs.")
    beside, given = inputs[output : output + 1], outputs[output].type
    if wanted in ANY:
        return next(iter([*beside, *inputs[:1]]), None)
    fits = [
        slot
        for slot in [*beside, *inputs[:MAX_COMPARED]]
        if _connects(slot.type, given) and _connects(slot.type, wanted)
    ]
    if beside and fits and fits[0] is beside[0]:
        return beside[0]
    return node.first_of_type.get(wanted, next(iter(fits), None))


def _connects(one: str, other: str) -> bool:
    kinds, others = set(one.lower().split(",")), set(other.lower().split(","))
    return not (ANY.isdisjoint(kinds | others) and kinds.isdisjoint(others))
