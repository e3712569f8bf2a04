"""UI-format workflows become the graph that the browser would send."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from comfyui_onediff_guard.headless.errors import UnknownNodesError, WorkflowError
from comfyui_onediff_guard.headless.workflow import schema, ui_format
from comfyui_onediff_guard.headless.workflow.graph import Graph, Link

NOISE_WIDGETS = [48, 7, "randomize", "nan", "a cat", 0.5]


def node(node_id: int, kind: str, widgets: Any = None, inputs: Any = (), outputs: Any = (), mode: int = 0) -> dict:
    return {
        "id": node_id,
        "type": kind,
        "mode": mode,
        "inputs": [{"name": name, "type": type_, "link": link} for name, type_, link in inputs],
        "outputs": [{"type": type_} for type_ in outputs],
        "widgets_values": widgets,
    }


def save(link: int | None, node_id: int = 2) -> dict:
    return node(node_id, "SaveImage", ["prefix"], [("images", "IMAGE", link)])


@pytest.fixture
def convert(classes: dict[str, type]) -> Any:
    def convert_it(nodes: list[dict], links: list[Any], **more: Any) -> Graph:
        data = {"nodes": nodes, "links": links, **more}
        known = ui_format.class_types(data) & set(classes)
        return ui_format.convert(data, {name: schema.from_class(name, classes[name]) for name in known})

    return convert_it


def test_widgets_are_named_and_the_seed_control_is_skipped(convert: Any) -> None:
    graph = convert([node(1, "Noise", NOISE_WIDGETS), save(5)], [[5, 1, 0, 2, 0, "IMAGE"]])
    assert graph.nodes["1"].inputs == {"width": 48, "seed": 7, "kind": "nan", "text": "a cat", "gain": 0.5}
    assert graph.nodes["2"].inputs == {"filename_prefix": "prefix", "images": Link("1", 0)}
    assert graph.workflow is not None


def test_what_tools_write_otherwise_than_the_page_means_the_same(convert: Any) -> None:
    """Every number a float, and `extra` a list."""
    nodes = [node(1, "Noise", NOISE_WIDGETS, outputs=["IMAGE"]), save(1), node(3, "Noise", mode=2)]
    links = [[1, 1, 0, 2, 0, "IMAGE"]]
    floats = json.loads(json.dumps([nodes, links]), parse_int=float)
    assert "1.0" in repr(floats)
    graph = convert(*floats, extra=[])
    assert set(graph.nodes) == {"1", "2"}
    assert graph.nodes["2"].inputs["images"] == Link("1", 0)


def test_without_a_seed_control_nothing_is_skipped(convert: Any) -> None:
    widgets = [value for value in NOISE_WIDGETS if value != "randomize"]
    graph = convert([node(1, "Noise", widgets), save(5)], [[5, 1, 0, 2, 0, "IMAGE"]])
    assert graph.nodes["1"].inputs["kind"] == "nan"


def test_a_seed_control_of_the_first_files_is_skipped(convert: Any) -> None:
    graph = convert([node(1, "Noise", [48, 7, True, "nan", "a cat", 0.5])], [])
    assert graph.nodes["1"].inputs == {"width": 48, "seed": 7, "kind": "nan", "text": "a cat", "gain": 0.5}


def test_widgets_that_the_file_has_no_value_for_have_their_defaults(convert: Any) -> None:
    graph = convert([node(1, "Noise", [48, 7, "fixed"]), node(2, "Noise")], [])
    rest = {"kind": "uniform", "text": "", "gain": 1.0}
    assert graph.nodes["1"].inputs == {"width": 48, "seed": 7, **rest}
    assert graph.nodes["2"].inputs == {"width": 32, "seed": 0, **rest}


def test_widgets_by_name_and_links_as_objects(convert: Any) -> None:
    link = {"id": 5, "origin_id": 1, "origin_slot": 0, "target_id": 2, "target_slot": 0, "type": "IMAGE"}
    graph = convert([node(1, "Noise", {"width": 48, "videopreview": {}}), save(5)], [link])
    assert graph.nodes["1"].inputs == {"width": 48, "seed": 0, "kind": "uniform", "text": "", "gain": 1.0}
    assert graph.nodes["2"].inputs["images"] == Link("1", 0)


def test_a_converted_widget_takes_its_link_and_keeps_the_places_of_the_others(convert: Any) -> None:
    target = node(1, "Noise", NOISE_WIDGETS, [("text", "STRING", 6)])
    target["inputs"][0]["widget"] = {"name": "text"}
    target["inputs"].append({"name": "width", "type": "INT", "link": None, "widget": {"name": "width"}})
    graph = convert([target, node(3, "Noise", NOISE_WIDGETS), save(5)], [[5, 1, 0, 2, 0, "I"], [6, 3, 1, 1, 0, "S"]])
    assert graph.nodes["1"].inputs["text"] == Link("3", 1)
    assert graph.nodes["1"].inputs["width"] == 48
    assert graph.nodes["1"].inputs["gain"] == 0.5


def test_notes_reroutes_and_primitives_vanish(convert: Any) -> None:
    target = node(1, "Noise", NOISE_WIDGETS, [("width", "INT", 8)])
    nodes = [
        target,
        node(3, "Reroute", None, [("", "*", 5)], ["*"]),
        node(4, "Reroute", None, [("", "*", 6)], ["*"]),
        node(7, "PrimitiveNode", [24, "fixed"], (), ["INT"]),
        node(9, "Note", ["hello"]),
        node(10, "MarkdownNote", ["hello"]),
        save(7),
    ]
    links = [[5, 1, 0, 3, 0, "*"], [6, 3, 0, 4, 0, "*"], [7, 4, 0, 2, 0, "*"], [8, 7, 0, 1, 0, "INT"]]
    graph = convert(nodes, links)
    assert set(graph.nodes) == {"1", "2"}
    assert graph.nodes["2"].inputs["images"] == Link("1", 0)
    assert graph.nodes["1"].inputs["width"] == 24


def test_a_muted_node_takes_its_links_with_it(convert: Any) -> None:
    graph = convert([node(1, "Noise", NOISE_WIDGETS, mode=2), save(5)], [[5, 1, 0, 2, 0, "IMAGE"]])
    assert set(graph.nodes) == {"2"}
    assert "images" not in graph.nodes["2"].inputs


def test_a_bypassed_node_passes_on_the_input_of_the_same_type(convert: Any) -> None:
    bypassed = node(3, "Anything", [3], [("number", "INT", None), ("images", "IMAGE", 6)], ["IMAGE"], mode=4)
    nodes = [node(1, "Noise", NOISE_WIDGETS), bypassed, save(5)]
    graph = convert(nodes, [[5, 3, 0, 2, 0, "IMAGE"], [6, 1, 0, 3, 1, "IMAGE"]])
    assert set(graph.nodes) == {"1", "2"}
    assert graph.nodes["2"].inputs["images"] == Link("1", 0)


def test_a_bypassed_node_without_such_an_input_passes_nothing(convert: Any) -> None:
    bypassed = node(3, "Anything", [3], [("number", "INT", None)], ["IMAGE"], mode=4)
    graph = convert([bypassed, save(5)], [[5, 3, 0, 2, 0, "IMAGE"]])
    assert "images" not in graph.nodes["2"].inputs


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("workflow>mine", {}),
        ("workflow/mine", {"extra": {"groupNodes": {"mine": {}}}}),
    ],
)
def test_group_nodes_are_refused(convert: Any, kind: str, more: dict[str, Any]) -> None:
    with pytest.raises(WorkflowError, match=r"Node 1 is a group node.*Export \(API\)"):
        convert([node(1, kind)], [], **more)


@pytest.mark.parametrize(
    ("nodes", "links", "message"),
    [
        ([save(5)], [], "Link 5 of the workflow leads nowhere"),
        ([save(5)], [[5, 77, 0, 2, 0, "IMAGE"]], "Link 5 of the workflow leads nowhere"),
        ([save(5)], [[5]], r"links\[0\] is \[5\]: a link should have 6 entries"),
        ([{"id": 1}], [], r"nodes\[0\].type is missing"),
        ([node(3, "Reroute", None, [("", "*", 5)]), save(5)], [[5, 3, 0, 3, 0, "*"]], "in a circle"),
    ],
)
def test_broken_workflows(convert: Any, nodes: list[dict], links: list[Any], message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        convert(nodes, links)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 2}, "Two nodes of the workflow have the id 2"),
        ({"id": "2"}, "Two nodes of the workflow have the id 2"),
        ({"id": []}, r"nodes\[0\].id is \[\]: input should be a valid string"),
        ({"title": 5}, r"nodes\[0\].title is 5"),
        ({"type": None}, r"nodes\[0\].type is None"),
        ({"inputs": [{"link": 5}]}, r"nodes\[0\].inputs\[0\].name is missing"),
        ({"inputs": [{"name": "text", "link": True}]}, r"nodes\[0\].inputs\[0\].link is True"),
        ({"widgets_values": "text"}, "widgets_values is text: input should be a list or an object"),
        ({"widgets_values": [float("inf")]}, "is inf: input should be a finite number"),
        ({"mode": 4, "outputs": []}, "A link takes output 0 of node 1, which has 0"),
        ({"mode": 4, "outputs": None}, "A link takes output 0 of node 1, which has 0"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(convert: Any, change: dict[str, Any], message: str) -> None:
    damaged = node(1, "Noise", NOISE_WIDGETS, outputs=["IMAGE"]) | change
    with pytest.raises(WorkflowError, match=message):
        convert([damaged, save(5)], [[5, 1, 0, 2, 0, "IMAGE"]])


def test_what_no_reader_of_json_takes_is_not_saved_with_the_pictures(convert: Any) -> None:
    graph = convert([node(1, "Noise", NOISE_WIDGETS), save(5)], [[5, 1, 0, 2, 0, "IMAGE"]], config={"scale": math.inf})
    assert graph.workflow["config"] == {"scale": None}


def test_an_unknown_type_is_named(convert: Any) -> None:
    with pytest.raises(UnknownNodesError, match="KSampler"):
        convert([node(1, "KSampler")], [])
