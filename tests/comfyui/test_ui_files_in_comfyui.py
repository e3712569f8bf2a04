"""Workflow files of the page's *Save*, run on a current ComfyUI without the page: subgraphs, and `format.codec`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import legs
import pytest
from PIL import Image
from runs import HEALTHY, SMALL, Ran, frames_of
from templates import ui_file

pytestmark = legs.IN_CHECKOUTS

Json = dict[str, Any]
RunGraph = Callable[..., Ran]


def link(link_id: int, origin: int, target: int) -> Json:
    return {"id": link_id, "origin_id": origin, "origin_slot": 0, "target_id": target, "target_slot": 0}


MAKE = {"id": 7, "type": "EmptyImage", "widgets_values": [32, 16, 1, 255], "outputs": [{"type": "IMAGE"}]}
MAKER = {
    "id": "maker",
    "name": "Maker",
    "nodes": [MAKE],
    "links": [link(1, 7, -20)],
    "outputs": [{"name": "IMAGE", "linkIds": [1]}],
}
AROUND = {
    "id": "around",
    "name": "Around",
    "nodes": [{"id": 5, "type": "maker", "outputs": [{"type": "IMAGE"}]}],
    "links": [link(2, 5, -20)],
    "outputs": [{"name": "IMAGE", "linkIds": [2]}],
}


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A workflow whose image comes from a node in a subgraph in a subgraph."""
    save = {"id": 2, "type": "SaveImage", "widgets_values": ["nested"], "inputs": [{"name": "images", "link": 3}]}
    data = {
        "nodes": [{"id": 1, "type": "around", "outputs": [{"type": "IMAGE"}]}, save],
        "links": [[3, 1, 0, 2, 0, "IMAGE"]],
        "definitions": {"subgraphs": [AROUND, MAKER]},
    }
    path = tmp_path / "nested.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_shipped_text_to_video_file_makes_video(run_graph: RunGraph, server: legs.Server) -> None:
    info = server.ask("/object_info/SaveVideo")["SaveVideo"]["input"]["required"]
    has_codec_option = info["format"][0] == "COMFY_DYNAMICCOMBO_V3"
    changes = {"OneDiffGuardLoadPipeline.model": HEALTHY, **SMALL}
    ran = run_graph(
        ui_file("cogvideox_text_to_video"),
        changes | {"SaveVideo.format.codec" if has_codec_option else "SaveVideo.codec": "h264"},
    )
    assert ran.code == 0, ran.stderr
    assert frames_of(ran.files[0]).shape == (9, 64, 96, 3)


def test_nested_subgraphs_run_and_are_named_in_progress(run_graph: RunGraph, nested: Path) -> None:
    ran = run_graph(nested, {"1:5:7.width": 24})
    assert ran.code == 0, ran.stderr
    assert "node 1:5:7 (EmptyImage) in 'Maker'" in ran.stderr
    with Image.open(ran.files[0]) as image:
        assert image.size == (24, 16)


def test_error_in_subgraph_names_its_node(run_graph: RunGraph, nested: Path) -> None:
    ran = run_graph(nested, {"EmptyImage.width": 0})
    assert ran.code == 2
    assert "node 1:5:7 (EmptyImage) in 'Maker': Value 0 smaller than min" in ran.answer["error"]
