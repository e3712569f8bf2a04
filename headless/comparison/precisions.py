"""A workflow made ready to be compared: which inputs set its precision, and which frames come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...trust.message import listed
from ..errors import WorkflowError
from ..workflow import settings
from ..workflow.graph import Graph, GraphNode, Link
from ..workflow.schema import Schema

INPUT = "precision"
FOLLOWS = "inherit"
REFERENCE = "fp32"
SHOWN = "onediff-guard-compare"  # id of the node that hands out the frames
PLAIN = "fp16 (plain)"
GUARD, UNGUARDED = "on_failure", "off"
NATIVE = (
    "ComfyUI's own models take their precision from how ComfyUI was started (--force-fp16, --force-fp32) or from "
    "their loader's weight_dtype, so it cannot be set here: start ComfyUI in each, and use 'onediff-guard run'."
)


@dataclass(frozen=True)
class Comparable:
    """A workflow whose precision can be set, and which makes frames."""

    graph: Graph
    nodes: tuple[str, ...]  # ids of those whose precision is set
    guards: tuple[str, ...]  # ids of those that are switched off for plain fp16
    frames: Link  # the IMAGE that is compared

    def in_precision(self, precision: str) -> Graph:
        """The workflow in this precision; all it puts out are the frames, as 8-bit PNG files.

        PreviewImage is in every ComfyUI, and what it writes there goes when ComfyUI is started again.
        """
        graph = self.graph.with_inputs({node_id: {INPUT: precision} for node_id in self.nodes})
        if precision == PLAIN:
            graph = graph.with_inputs({node_id: {GUARD: UNGUARDED} for node_id in self.guards})
        needed = {node_id: graph.nodes[node_id] for node_id in graph.order_for([self.frames.node])}
        return replace(
            graph, nodes={**needed, SHOWN: GraphNode(SHOWN, "PreviewImage", {"images": self.frames})}, workflow=None
        )


def comparable(
    graph: Graph, schemas: Mapping[str, Schema], changes: Sequence[settings.Setting], precisions: Sequence[str]
) -> Comparable:
    """Find what sets the workflow's precision, and what it makes. A precision that `changes` sets is held.

    Raises WorkflowError where it has nothing to set a precision with, not these precisions, or makes no pictures.
    """
    graph = settings.apply(graph, changes, schemas)
    held = {(node.id, spec.name) for node, spec in (change.found_in(graph, schemas) for change in changes)}
    having = _with_choice(graph, schemas, INPUT, REFERENCE)
    if not having:
        found = listed(sorted(graph.class_types()))
        raise WorkflowError(
            f"The workflow has no node with a precision to set. Found: {found}. Expected: a loader of this pack, such "
            f"as Load Pipeline. {NATIVE}"
        )
    set_here = [n for n in having if (n.id, INPUT) not in held and n.inputs.get(INPUT) != FOLLOWS]
    if not set_here:
        labels = listed(node.label for node in having)
        raise WorkflowError(f"Every precision of the workflow is held: {labels}. Leave one of them out of --set.")
    for node in set_here:
        options = schemas[node.class_type].inputs[INPUT].options
        if unknown := [precision for precision in precisions if precision not in options]:
            raise WorkflowError(
                f"{node.label} has no precision {listed(map(repr, unknown))}. "
                f"It has {listed(map(repr, options))}: name some of these with --precisions."
            )
    varied = tuple(node.id for node in set_here)
    guards = tuple(n.id for n in _with_choice(graph, schemas, GUARD, UNGUARDED) if (n.id, GUARD) not in held)
    return Comparable(graph, varied, guards, _frames(graph, schemas, set(varied)))


def _with_choice(graph: Graph, schemas: Mapping[str, Schema], name: str, option: str) -> list[GraphNode]:
    """The nodes that have a drop-down of this name with this option in it."""
    having = [(node, schemas[node.class_type].inputs.get(name)) for node in graph.nodes.values()]
    return [node for node, spec in having if spec and option in spec.options]


def _frames(graph: Graph, schemas: Mapping[str, Schema], varied: set[str]) -> Link:
    """The first IMAGE that hangs on a node whose precision varies, and that an output node takes or a VIDEO for one is
    made of."""
    outputs = [node for node in graph.nodes.values() if schemas[node.class_type].is_output]
    hanging: set[str] = set()
    videos: list[GraphNode] = []
    for node_id in graph.order_for(node.id for node in outputs):  # no links into nowhere or in a circle
        node = graph.nodes[node_id]
        if node_id in varied or any(link.node in hanging for link in node.links().values()):
            hanging.add(node_id)
        if "VIDEO" in schemas[node.class_type].outputs:
            videos.append(node)
    for node in [*outputs, *reversed(videos)]:
        for link in node.links().values():
            kinds = schemas[graph.nodes[link.node].class_type].outputs
            if link.node in hanging and kinds[link.slot : link.slot + 1] == ("IMAGE",):
                return link
    found = listed(node.label for node in outputs) or "none"
    raise WorkflowError(
        f"The workflow saves no pictures that could be compared. Its output nodes: {found}. "
        "Expected: one that takes an IMAGE or a VIDEO, such as SaveImage."
    )
