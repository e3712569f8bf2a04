"""Everything that can be wrong with a workflow in this process, found before the first node runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...trust.text import listed, shown
from ..errors import UnknownNodesError, WorkflowError
from . import schema as schemas_of
from .graph import Graph, Link, Node
from .schema import InputSpec, Schema

FRONTEND_LEFTOVERS = frozenset({"upload", "speak_and_recognation"})  # exported by the browser, read by no node
MAX_FAULTS_SHOWN = 20
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class Plan:
    """A workflow that is fit to run."""

    graph: Graph  # with every value converted to its input's type
    order: tuple[str, ...]  # ids of the nodes that outputs need, each after its sources
    schemas: Mapping[str, Schema]  # by node type


def known_schemas(types: set[str], classes: Mapping[str, type]) -> dict[str, Schema]:
    """The schemas of those types that have a class.

    Raises:
        UnknownNodesError: the others, by name.
    """
    unknown = sorted(types - set(classes))
    if unknown:
        raise UnknownNodesError(
            f"Without a ComfyUI there is no node type {listed(unknown)}: only this pack's nodes and "
            "LoadImage, SaveImage, PreviewImage, CreateVideo, SaveVideo and SaveAnimatedWEBP run in this process. "
            "Use --server URL with a running ComfyUI, or --comfyui DIR with a checkout."
        )
    return {name: schemas_of.from_class(name, classes[name]) for name in types}


def plan(graph: Graph, classes: Mapping[str, type]) -> Plan:
    """Check the whole workflow and decide what runs in which order.

    Raises:
        WorkflowError: with one line for each fault.
    """
    schemas = known_schemas(graph.class_types(), classes)
    outputs = [node.id for node in graph.nodes.values() if schemas[node.class_type].is_output]
    if not outputs:
        raise WorkflowError("The workflow saves nothing: it has no output node. Add one, for example SaveVideo.")
    order = graph.order_for(outputs)
    faults: list[str] = []
    nodes = dict(graph.nodes)
    for node_id in order:
        node = graph.nodes[node_id]
        checker = _NodeChecker(graph, node, schemas, classes[node.class_type])
        nodes[node_id] = replace(node, inputs=checker.checked_inputs())
        faults += [f"{node.label}: {fault}" for fault in checker.faults]
    if faults:
        lines = [f"  {fault}" for fault in faults[:MAX_FAULTS_SHOWN]]
        if len(faults) > len(lines):
            lines.append(f"  and {len(faults) - len(lines)} more")
        raise WorkflowError("\n".join(["The workflow cannot run:", *lines]))
    return Plan(replace(graph, nodes=nodes), tuple(order), schemas)


class _NodeChecker:
    """One node's inputs against its schema and its own VALIDATE_INPUTS."""

    def __init__(self, graph: Graph, node: Node, schemas: Mapping[str, Schema], node_class: type) -> None:
        self.graph = graph
        self.node = node
        self.schemas = schemas
        self.schema = schemas[node.class_type]
        self.validate = getattr(node_class, "VALIDATE_INPUTS", None)
        self.faults: list[str] = []

    def checked_inputs(self) -> dict[str, Any]:
        known = self.schema.inputs_with(self.node.inputs)
        if unknown := [name for name in self.node.inputs if name not in known and name not in FRONTEND_LEFTOVERS]:
            self.faults.append(f"has no input {listed(map(_told, unknown))}. Its inputs: {listed(known, 50) or 'none'}")
        checked: dict[str, Any] = {}
        for name, spec in known.items():
            if name not in self.node.inputs:
                if spec.required:
                    self.faults.append(f"input '{name}' ({spec.type}) is missing")
                continue
            value = self.node.inputs[name]
            try:
                checked[name] = self._link(spec, value) if isinstance(value, Link) else self._value(spec, value)
            except ValueError as fault:
                self.faults.append(f"input '{name}' {fault}")
        if not self.faults and self.validate is not None:
            self._ask_node(checked)
        return checked

    def _link(self, spec: InputSpec, link: Link) -> Link:
        source = self.graph.nodes[link.node]
        outputs = self.schemas[source.class_type].outputs
        if not 0 <= link.slot < len(outputs):
            raise ValueError(f"is linked to output {link.slot} of {source.label}, which has {len(outputs)}")
        if not _matches(outputs[link.slot], spec.type):
            raise ValueError(f"takes {spec.type}, but {source.label} gives {outputs[link.slot]}")
        return link

    def _value(self, spec: InputSpec, value: Any) -> Any:
        if spec.type not in schemas_of.WIDGETS:
            raise ValueError(f"takes a link to a node that gives {spec.type}, found the value {_told(value)}")
        value = _convert(spec, value)
        if self._is_own_check(spec.name):
            return value
        if spec.type == "COMBO" and value not in spec.options:
            raise ValueError(f"is {_told(value)}, expected {_one_of(spec.options)}")
        if spec.type in {"INT", "FLOAT"}:
            low, high = spec.config.get("min"), spec.config.get("max")
            if low is not None and value < low:
                raise ValueError(f"is {shown(value)}, must be at least {low}")
            if high is not None and value > high:
                raise ValueError(f"is {shown(value)}, must be at most {high}")
        return value

    def _is_own_check(self, name: str) -> bool:
        """Whether the node itself checks this input; ComfyUI then leaves range and options to it."""
        if self.validate is None:
            return False
        parameters = inspect.signature(self.validate).parameters.values()
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)

    def _ask_node(self, checked: Mapping[str, Any]) -> None:
        assert self.validate is not None
        given = {
            name: None if isinstance(value, Link) else value
            for name, value in checked.items()
            if self._is_own_check(name)
        }
        if "input_types" in inspect.signature(self.validate).parameters:
            given["input_types"] = {
                name: self.schemas[self.graph.nodes[link.node].class_type].outputs[link.slot]
                for name, link in checked.items()
                if isinstance(link, Link)
            }
        try:
            verdict = self.validate(**given)
        except Exception as error:  # noqa: BLE001 - a node may raise anything
            self.faults.append(f"its inputs could not be checked: {type(error).__name__}: {shown(error, 300)}")
            return
        if verdict is not True:
            self.faults.append(str(verdict or "refuses its inputs"))


def _matches(given: str, wanted: str) -> bool:
    kinds = [{kind.strip() for kind in side.split(",")} for side in (given, wanted)]
    return "*" in kinds[0] | kinds[1] or bool(kinds[0] & kinds[1])


def _convert(spec: InputSpec, value: Any) -> Any:
    """The value as its input's type; text is read, nothing is rounded or guessed."""
    if spec.type == "STRING":
        return value if isinstance(value, str) else str(value)
    if spec.type == "BOOLEAN":
        return _boolean(value)
    if spec.type in {"INT", "FLOAT"}:
        return _number(spec, value)
    return value


def _boolean(value: Any) -> bool:
    found = BOOLEANS.get(shown(value).lower()) if isinstance(value, (bool, int, str)) else None
    if found is None:
        raise ValueError(f"is {_told(value)}, expected true or false")
    return found


def _number(spec: InputSpec, value: Any) -> int | float:
    kind = "a whole number" if spec.type == "INT" else "a number"
    if spec.type == "INT" and type(value) is int:
        return value
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError
        if spec.type == "INT" and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
            return int(value)
        number = float(value)
        if not math.isfinite(number) or (spec.type == "INT" and not number.is_integer()):
            raise ValueError
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"is {_told(value)}, expected {kind}") from None
    return int(number) if spec.type == "INT" else number


def _one_of(options: tuple[Any, ...]) -> str:
    if not options:
        return "one of its options, but there is none (is its folder empty?)"
    named = listed(map(_told, options))
    return f"one of {named}" if len(options) > 1 else named


def _told(value: Any) -> str:
    """A value for a message; text has quotes."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)
