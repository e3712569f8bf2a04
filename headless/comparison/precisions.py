"""A workflow prepared for comparison: the inputs that set its precision, and the frames that are compared."""

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
SHOWN = "onediff-guard-compare"  # id of the node that outputs the frames
PLAIN = "fp16 (plain)"
GUARD, UNGUARDED = "on_failure", "off"
NATIVE = (
    "The precision of ComfyUI's own models cannot be set here: ComfyUI's start options (--force-fp16, --force-fp32) "
    "or their loader's weight_dtype set it. Start ComfyUI in each precision, and use 'onediff-guard run'."
)


@dataclass(frozen=True)
class Comparable:
    """A workflow that makes frames, and whose precision can be set."""

    graph: Graph
    nodes: tuple[str, ...]  # ids of the nodes whose precision is set
    guards: tuple[str, ...]  # ids of the nodes that are switched off for plain fp16
    frames: Link  # the compared IMAGE

    def in_precision(self, precision: str) -> Graph:
        """Return the workflow in this precision; its only outputs are the frames, as 8-bit PNG files.

        Every ComfyUI has PreviewImage, and deletes its files at the next start.
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
    """Find the inputs that set the workflow's precision, and its frames. A precision that `changes` sets is not varied.

    Raises WorkflowError if the workflow has no precision to set, lacks one of these precisions, or saves no pictures.
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
        raise WorkflowError(f"--set sets every precision of the workflow: {labels}. Remove one of them from --set.")
    for node in set_here:
        options = schemas[node.class_type].inputs[INPUT].options
        if unknown := [precision for precision in precisions if precision not in options]:
            raise WorkflowError(
                f"{node.label} has no precision {listed(map(repr, unknown))}. It has {listed(map(repr, options))}: "
                "choose from these with --precisions."
            )
    varied = tuple(node.id for node in set_here)
    guards = tuple(n.id for n in _with_choice(graph, schemas, GUARD, UNGUARDED) if (n.id, GUARD) not in held)
    return Comparable(graph, varied, guards, _frames(graph, schemas, set(varied)))


def _with_choice(graph: Graph, schemas: Mapping[str, Schema], name: str, option: str) -> list[GraphNode]:
    """Return the nodes with a drop-down of this name that has this option."""
    having = [(node, schemas[node.class_type].inputs.get(name)) for node in graph.nodes.values()]
    return [node for node, spec in having if spec and option in spec.options]


def _frames(graph: Graph, schemas: Mapping[str, Schema], varied: set[str]) -> Link:
    """Return the first IMAGE that depends on a node with varied precision, and that an output node, or else a node that
    makes a VIDEO, takes."""
    outputs = [node for node in graph.nodes.values() if schemas[node.class_type].is_output]
    hanging: set[str] = set()
    videos: list[GraphNode] = []
    for node_id in graph.order_for(node.id for node in outputs):  # raises for links to missing nodes and for cycles
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
        f"The workflow saves no images to compare. Its output nodes: {found}. Expected: one that takes an IMAGE or a "
        "VIDEO, such as SaveImage."
    )
