"""Write subgraphs/: blueprints, which newer ComfyUI pages list among the nodes, each made from a shipped workflow.

    python scripts/blueprints.py

A blueprint is a workflow of one subgraph node that contains the other nodes. ComfyUI lists those in a pack's folder
`subgraphs` (app/subgraph_manager.py), by file name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "subgraphs"
CATEGORY = "OneDiff Guard"
INPUTS, OUTPUTS = -10, -20  # ids of the subgraph's own sides in its links
SLOT = 20  # pixels from one slot to the next
SIDE = (180, 140)  # pixels between the inner nodes and the subgraph's inputs and outputs, and their width
FOLDED = (400, 480)  # the subgraph node: width, height; pixels

Json = dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    name: str  # the file's name, which pages show
    workflow: str
    description: str
    shown: Mapping[str, tuple[str, ...]]  # type of an inner node -> widgets that the subgraph node shows


_TEXT = ("prompt", "negative_prompt")
_SIZE = ("width", "height", "frames", "steps")

BLUEPRINTS = (
    Blueprint(
        "Guarded CogVideoX Text to Video",
        "CogVideoX 2B text to video - no NaN or black frames in fp16",
        "Prompt → frames, with CogVideoX. Precision is chosen for your card; a failing step is recomputed in fp32.",
        {
            "OneDiffGuardLoadPipeline": ("model", "precision"),
            "OneDiffGuardNaNGuard": (),
            "OneDiffGuardEncodePrompt": _TEXT,
            "OneDiffGuardSampleCogVideoX": (*_SIZE, "guidance_scale", "seed"),
            "OneDiffGuardDecodeLatents": (),
        },
    ),
    Blueprint(
        "Guarded SVD Image to Video",
        "SVD image to video - no NaN or black frames in fp16",
        "Image → frames, with Stable Video Diffusion. Precision is chosen for your card; a failing step is recomputed "
        "in fp32.",
        {
            "OneDiffGuardLoadPipeline": ("model", "precision"),
            "OneDiffGuardSampleStableVideoDiffusion": (*_SIZE, "fps", "motion_bucket_id", "seed"),
            "OneDiffGuardDecodeLatents": ("chunk",),
        },
    ),
    Blueprint(
        "Guarded KSampler and VAE Decode",
        "SD 1.5 native text to image - no NaN or black image in fp16",
        "Guarded KSampler and VAE Decode for any of ComfyUI's own models: a NaN or infinite result is recomputed in "
        "fp32.",
        {
            "OneDiffGuardNaNGuardNative": ("precision",),
            "KSampler": ("seed", "steps", "cfg", "sampler_name", "scheduler", "denoise"),
            "VAEDecode": (),
        },
    ),
)


@dataclass(frozen=True)
class Wire:
    """A link of a workflow file."""

    id: int
    origin: int  # id of a node
    origin_slot: int
    target: int
    target_slot: int
    type: str


def fold(blueprint: Blueprint, workflow: Json) -> Json:
    """Return the blueprint as a workflow file. Links into its nodes from others become inputs, links out of them become
    outputs, each source once, in the order of the nodes."""
    nodes = {node["id"]: deepcopy(node) for node in workflow["nodes"] if node["type"] in blueprint.shown}
    wires = [Wire(*link) for link in workflow["links"]]
    within = [wire for wire in wires if wire.origin in nodes and wire.target in nodes]
    incoming = _by_origin(wire for wire in wires if wire.origin not in nodes and wire.target in nodes)
    outgoing = _by_origin(wire for wire in wires if wire.origin in nodes and wire.target not in nodes)
    last = workflow["last_link_id"]
    leaving = [
        Wire(last + 1 + n, *source, OUTPUTS, n, group[0].type) for n, (source, group) in enumerate(outgoing.items())
    ]
    entering = [
        [Wire(wire.id, INPUTS, n, wire.target, wire.target_slot, wire.type) for wire in group]
        for n, group in enumerate(incoming.values())
    ]
    links = [*within, *(wire for group in entering for wire in group), *leaving]
    for node in nodes.values():
        for slot, output in enumerate(node["outputs"]):
            output["links"] = [wire.id for wire in links if (wire.origin, wire.origin_slot) == (node["id"], slot)]
    inputs = [
        _port(blueprint, nodes[group[0].target]["inputs"][group[0].target_slot]["name"], group) for group in entering
    ]
    outputs = [_port(blueprint, nodes[wire.origin]["outputs"][wire.origin_slot]["name"], [wire]) for wire in leaving]
    left, top, right = _bounds(nodes.values())
    of_node = workflow["last_node_id"] + 1
    subgraph = {
        "id": _id(blueprint),
        "version": 1,
        "state": {"lastGroupId": 0, "lastNodeId": of_node, "lastLinkId": last + len(leaving), "lastRerouteId": 0},
        "revision": 0,
        "config": {},
        "name": blueprint.name,
        "inputNode": {"id": INPUTS, "bounding": [left - sum(SIDE), top, SIDE[1], SLOT * (len(inputs) + 2)]},
        "outputNode": {"id": OUTPUTS, "bounding": [right + SIDE[0], top, SIDE[1], SLOT * (len(outputs) + 2)]},
        "inputs": inputs,
        "outputs": outputs,
        "widgets": [],
        "nodes": list(nodes.values()),
        "groups": [],
        "links": [
            {
                "id": wire.id,
                "origin_id": wire.origin,
                "origin_slot": wire.origin_slot,
                "target_id": wire.target,
                "target_slot": wire.target_slot,
                "type": wire.type,
            }
            for wire in links
        ],
        "extra": {},
        "category": CATEGORY,
        "description": blueprint.description,
    }
    node = {
        "id": of_node,
        "type": subgraph["id"],
        "pos": [0, 0],
        "size": list(FOLDED),
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [{"name": port["name"], "type": port["type"], "link": None} for port in inputs],
        "outputs": [{"name": port["name"], "type": port["type"], "links": []} for port in outputs],
        "properties": {
            "proxyWidgets": [
                [str(inner["id"]), widget] for inner in nodes.values() for widget in blueprint.shown[inner["type"]]
            ]
        },
        "widgets_values": [],
        "title": blueprint.name,
    }
    return {
        "revision": 0,
        "last_node_id": of_node,
        "last_link_id": 0,
        "nodes": [node],
        "links": [],
        "version": 0.4,
        "definitions": {"subgraphs": [subgraph]},
        "extra": {},
    }


def _by_origin(wires: Iterable[Wire]) -> dict[tuple[int, int], list[Wire]]:
    """Return the wires of each output, by (node, slot)."""
    found: dict[tuple[int, int], list[Wire]] = {}
    for wire in sorted(wires, key=lambda wire: (wire.target, wire.target_slot)):
        found.setdefault((wire.origin, wire.origin_slot), []).append(wire)
    return found


def _port(blueprint: Blueprint, name: str, wires: list[Wire]) -> Json:
    """Return an input or output of the subgraph."""
    side = "in" if wires[0].origin == INPUTS else "out"
    return {
        "id": str(uuid5(NAMESPACE_URL, f"{blueprint.name}/{side}/{name}")),
        "name": name,
        "type": wires[0].type,
        "linkIds": [wire.id for wire in wires],
    }


def _id(blueprint: Blueprint) -> str:
    return str(uuid5(NAMESPACE_URL, blueprint.name))


def _bounds(nodes: Iterable[Json]) -> tuple[int, int, int]:
    """Return the nodes' left, upper and right edge; pixels."""
    nodes = list(nodes)
    left, top = (min(node["pos"][axis] for node in nodes) for axis in (0, 1))
    return left, top, max(node["pos"][0] + node["size"][0] for node in nodes)


def files() -> Iterator[tuple[Path, str]]:
    """Yield each blueprint's file and text."""
    for blueprint in BLUEPRINTS:
        workflow = json.loads((ROOT / "workflows" / f"{blueprint.workflow}.json").read_text(encoding="utf-8"))
        folded = json.dumps(fold(blueprint, workflow), indent=2, ensure_ascii=False)
        yield FOLDER / f"{blueprint.name}.json", f"{folded}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in files():
        file.write_text(text, encoding="utf-8")
