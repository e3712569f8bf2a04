"""Validation of a workflow for this process, before the first node runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from ...trust.message import listed, shown
from ..errors import UnknownNodesError, WorkflowError
from . import schema as schemas_of
from .graph import Graph, GraphNode, Link
from .schema import InputSpec, Schema

FRONTEND_LEFTOVERS = frozenset({"upload", "speak_and_recognation"})  # the browser exports them, but no node reads them
MAX_FAULTS_SHOWN = 20
TYPES: Mapping[str, tuple[TypeAdapter[Any], str]] = {  # type → (parser, description of the expected value)
    "INT": (TypeAdapter(int), "a whole number"),
    "FLOAT": (TypeAdapter(Annotated[float, Field(allow_inf_nan=False)]), "a number"),
    "BOOLEAN": (TypeAdapter(bool), "true or false"),
}


@dataclass(frozen=True)
class WorkflowPlan:
    """A validated workflow."""

    graph: Graph  # with every value converted to its input's type
    order: tuple[str, ...]  # ids of the nodes to run, each after its sources
    schemas: Mapping[str, Schema]  # by node type


def known_schemas(types: set[str], classes: Mapping[str, type]) -> dict[str, Schema]:
    """Return the schemas of node types. Raises UnknownNodesError naming those without a class."""
    unknown = sorted(types - set(classes))
    if unknown:
        raise UnknownNodesError(
            f"Node type {listed(unknown)} needs ComfyUI: only this pack's nodes and LoadImage, SaveImage, "
            "PreviewImage, CreateVideo, SaveVideo and SaveAnimatedWEBP run in this process. Use --server URL with a "
            "running ComfyUI, or --comfyui DIR with a checkout."
        )
    return {name: schemas_of.from_class(name, classes[name]) for name in types}


def plan(graph: Graph, classes: Mapping[str, type]) -> WorkflowPlan:
    """Check the whole workflow and order its nodes. Raises WorkflowError with a line for each fault."""
    schemas = known_schemas(graph.class_types(), classes)
    outputs = [node.id for node in graph.nodes.values() if schemas[node.class_type].is_output]
    if not outputs:
        raise WorkflowError("The workflow saves nothing: it has no output node. Add one, for example SaveVideo.")
    order = graph.order_for(outputs)
    faults: list[str] = []
    nodes = dict(graph.nodes)
    for node_id in order:
        node = graph.nodes[node_id]
        own_check = getattr(classes[node.class_type], "VALIDATE_INPUTS", None)
        inputs, found = _checked(node, graph, schemas, own_check)
        nodes[node_id] = replace(node, inputs=inputs)
        faults += [f"{node.label}: {fault}" for fault in found]
    if faults:
        lines = [f"  {fault}" for fault in faults[:MAX_FAULTS_SHOWN]]
        if len(faults) > len(lines):
            lines.append(f"  and {len(faults) - len(lines)} more")
        raise WorkflowError("\n".join(["The workflow cannot run:", *lines]))
    return WorkflowPlan(replace(graph, nodes=nodes), tuple(order), schemas)


def _checked(
    node: GraphNode, graph: Graph, schemas: Mapping[str, Schema], own_check: Callable[..., Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return a node's converted inputs, and their faults by its schema and its own VALIDATE_INPUTS."""
    known = schemas[node.class_type].inputs_with(node.inputs)
    own = inspect.signature(own_check).parameters if own_check else {}
    faults: list[str] = []
    if unknown := [name for name in node.inputs if name not in known and name not in FRONTEND_LEFTOVERS]:
        faults.append(f"has no input {listed(map(_told, unknown))}. Its inputs: {listed(known, 50) or 'none'}")
    checked: dict[str, Any] = {}
    for name, spec in known.items():
        value = node.inputs.get(name)
        try:
            if isinstance(value, Link):
                checked[name] = _link(spec, value, graph, schemas)
            elif name in node.inputs:
                checked[name] = _converted(spec, value)
                if name not in own:  # as in ComfyUI: a node that validates an input itself checks its range and options
                    _check_range(spec, checked[name])
            elif spec.required:
                raise ValueError(f"({spec.type}) is missing")
        except ValueError as fault:
            faults.append(f"input '{name}' {fault}")
    if own_check and not faults:
        given = {name: None if isinstance(checked[name], Link) else checked[name] for name in own if name in checked}
        try:
            verdict = own_check(**given)
        except Exception as error:  # noqa: BLE001 - a node may raise anything
            verdict = f"its inputs could not be checked: {type(error).__name__}: {shown(error, 300)}"
        if verdict is not True:
            faults.append(str(verdict or "refuses its inputs"))
    return checked, faults


def _link(spec: InputSpec, link: Link, graph: Graph, schemas: Mapping[str, Schema]) -> Link:
    source = graph.nodes[link.node]
    outputs = schemas[source.class_type].outputs
    if not 0 <= link.slot < len(outputs):
        raise ValueError(f"is linked to output {link.slot} of {source.label}, which has {len(outputs)} outputs")
    given = outputs[link.slot]
    ours, theirs = ({kind.strip() for kind in side.split(",")} for side in (spec.type, given))
    if "*" not in ours | theirs and ours.isdisjoint(theirs):
        raise ValueError(f"takes {spec.type}, but {source.label} outputs {given}")
    return link


def _converted(spec: InputSpec, value: Any) -> Any:
    """Convert a value to its input's type: text is parsed, nothing is rounded. Raises ValueError."""
    if spec.kind not in schemas_of.WIDGETS:
        raise ValueError(f"needs a link to a node that outputs {spec.type}, found the value {_told(value)}")
    if spec.kind == "STRING":
        return str(value)
    if spec.kind not in TYPES:
        return value
    read, expected = TYPES[spec.kind]
    if spec.kind == "BOOLEAN" or not isinstance(value, bool):
        with suppress(ValidationError):
            return read.validate_python(value)
    raise ValueError(f"is {_told(value)}, expected {expected}")


def _check_range(spec: InputSpec, value: Any) -> None:
    """Raises ValueError."""
    if spec.type == "COMBO" and value not in spec.options:
        options = listed(map(_told, spec.options))
        expected = f"one of {options}" if options else "one of its options, but it has none (is its folder empty?)"
        raise ValueError(f"is {_told(value)}, expected {expected}")
    if spec.kind in {"INT", "FLOAT"}:
        low, high = spec.config.get("min"), spec.config.get("max")
        if low is not None and value < low:
            raise ValueError(f"is {shown(value)}, must be at least {low}")
        if high is not None and value > high:
            raise ValueError(f"is {shown(value)}, must be at most {high}")


def _told(value: Any) -> str:
    """Format a value for a message; text gets quotes."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)
