"""Subgraphs are unfolded as the page does it: ids "1:2:3", links in and out of them, and widgets shown on them."""

from __future__ import annotations

from typing import Any

import pytest
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.workflow import schema, settings, ui_format
from comfyui_onediff_guard.headless.workflow.graph import Graph, Link
from comfyui_onediff_guard.headless.workflow.settings import Setting

Json = dict[str, Any]
NOISE = [48, 7, "randomize", "nan", "a cat", 0.5]  # width, seed, its control, kind, text, gain
IN, OUT = -10, -20


def node(node_id: int, kind: str, widgets: Any = None, inputs: Any = (), **more: Any) -> Json:
    slots = [{"name": name, "type": type_, "link": link} for name, type_, link in inputs]
    return {"id": node_id, "type": kind, "widgets_values": widgets, "inputs": slots, "outputs": [{"type": "*"}], **more}


def noise(node_id: int, *inputs: Any, **more: Any) -> Json:
    return node(node_id, "Noise", NOISE, inputs, **more)


def save(node_id: int, link: int) -> Json:
    return node(node_id, "SaveImage", ["prefix"], [("images", "IMAGE", link)])


def link(link_id: int, origin: int, slot: int, target: int, target_slot: int = 0, kind: str = "IMAGE") -> Json:
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    return dict(zip(names, (link_id, origin, slot, target, target_slot, kind), strict=True))


def subgraph(name: str, nodes: list[Json], links: list[Json], inputs: Json = {}, outputs: list[int] = []) -> Json:  # noqa: B006
    return {
        "id": name,
        "name": f"My {name}",
        "nodes": nodes,
        "links": links,
        "inputs": [{"name": name, "type": "*", "linkIds": ids} for name, ids in inputs.items()],
        "outputs": [{"name": f"out{n}", "type": "IMAGE", "linkIds": [each]} for n, each in enumerate(outputs)],
    }


MAKER = subgraph(
    "maker", [noise(11, ("text", "STRING", 1))], [link(1, IN, 0, 11), link(2, 11, 0, OUT)], {"text": [1]}, [2]
)


@pytest.fixture
def convert(classes: dict[str, type]) -> Any:
    def convert_it(nodes: list[Json], links: list[Json], *subgraphs: Json, **more: Any) -> Graph:
        data = {"nodes": nodes, "links": links, "definitions": {"subgraphs": list(subgraphs)}, **more}
        known = ui_format.class_types(data) & set(classes)
        return ui_format.convert(data, {name: schema.from_class(name, classes[name]) for name in known})

    return convert_it


def test_the_nodes_in_a_subgraph_have_its_id_before_theirs(convert: Any) -> None:
    graph = convert([node(1, "maker"), save(2, 5)], [link(5, 1, 0, 2)], MAKER)
    assert set(graph.nodes) == {"1:11", "2"}
    assert graph.nodes["2"].inputs["images"] == Link("1:11", 0)
    assert graph.nodes["1:11"].inputs["text"] == "a cat"
    assert graph.nodes["1:11"].label == "node 1:11 (Noise) in 'My maker'"
    assert graph.nodes["2"].label == "node 2 (SaveImage)"


def test_subgraphs_in_subgraphs_and_one_used_twice(convert: Any) -> None:
    pair = subgraph(
        "pair",
        [node(21, "maker"), node(22, "maker", title="Second"), node(23, "Picky", [2], [("images", "IMAGE", 3)])],
        [link(3, 22, 0, 23), link(4, 21, 0, OUT), link(6, 23, 0, OUT)],
        {},
        [4, 6],
    )
    nodes = [node(1, "pair"), save(2, 5), save(3, 7)]
    graph = convert(nodes, [link(5, 1, 0, 2), link(7, 1, 1, 3)], pair, MAKER)
    assert set(graph.nodes) == {"1:21:11", "1:22:11", "1:23", "2", "3"}
    assert graph.nodes["2"].inputs["images"] == Link("1:21:11", 0)
    assert graph.nodes["3"].inputs["images"] == Link("1:23", 0)
    assert graph.nodes["1:23"].inputs["images"] == Link("1:22:11", 0)
    assert graph.nodes["1:22:11"].label == "node 1:22:11 (Noise) in 'Second'"


def test_what_is_linked_to_a_subgraph_reaches_the_nodes_in_it(convert: Any) -> None:
    outer = subgraph(
        "outer", [node(21, "maker", [], [("text", "*", 3)])], [link(3, IN, 0, 21), link(4, 21, 0, OUT)], {"t": [3]}, [4]
    )
    nodes = [noise(9), node(1, "outer", [], [("t", "*", 6)]), save(2, 5)]
    graph = convert(nodes, [link(5, 1, 0, 2), link(6, 9, 1, 1)], outer, MAKER)
    assert graph.nodes["1:21:11"].inputs["text"] == Link("9", 1)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ({"widgets_values": ["a dog"]}, "a dog"),
        ({"widgets_values": []}, "a cat"),
        ({}, "a cat"),
        ({"widgets_values": ["a dog"], "properties": {"proxyWidgets": [["11", "text"]]}}, "a dog"),
        ({"widgets_values": [4, "a dog"], "properties": {"proxyWidgets": [["11", "width"], ["-1", "text"]]}}, "a dog"),
        ({"widgets_values": [], "properties": {"proxyWidgets": [["11", "text"]]}}, "a cat"),
        ({"widgets_values": ["a dog"], "properties": {"proxyWidgets": [["99", "text"]]}}, "a dog"),
        ({"widgets_values": ["a dog"], "properties": {"proxyWidgets": "[["}}, "a dog"),
    ],
)
def test_a_widget_shown_on_a_subgraph_holds_the_value(convert: Any, host: Json, text: str) -> None:
    """Of the file, in both ways that pages have written it; what the node in it holds where there is none."""
    graph = convert([node(1, "maker") | host, save(2, 5)], [link(5, 1, 0, 2)], MAKER)
    assert graph.nodes["1:11"].inputs["text"] == text


def test_a_widget_that_only_the_old_way_shows(convert: Any) -> None:
    """Another of the same subgraph keeps its own."""
    shown = subgraph("maker", [noise(11, ("width", "INT", None))], [link(2, 11, 0, OUT)], {}, [2])
    host = node(1, "maker", [24]) | {"properties": {"proxyWidgets": [["11", "width"]]}}
    graph = convert([host, node(3, "maker"), save(2, 5), save(4, 6)], [link(5, 1, 0, 2), link(6, 3, 0, 4)], shown)
    assert graph.nodes["1:11"].inputs["width"] == 24
    assert graph.nodes["3:11"].inputs["width"] == 48


def test_a_widget_shown_through_two_subgraphs(convert: Any) -> None:
    outer = subgraph(
        "outer",
        [node(21, "maker", ["a fox"], [("text", "*", 3)])],
        [link(3, IN, 0, 21), link(4, 21, 0, OUT)],
        {"t": [3]},
        [4],
    )
    nodes = [node(1, "outer", ["a dog"]), node(2, "outer", []), save(3, 5), save(4, 6)]
    graph = convert(nodes, [link(5, 1, 0, 3), link(6, 2, 0, 4)], outer, MAKER)
    assert graph.nodes["1:21:11"].inputs["text"] == "a dog"
    assert graph.nodes["2:21:11"].inputs["text"] == "a fox"


def test_muted_and_bypassed_subgraphs(convert: Any) -> None:
    passing = subgraph("passing", [noise(11)], [link(2, 11, 0, OUT)], {"images": []}, [2])
    bypassed = node(1, "passing", [], [("images", "IMAGE", 6)], mode=4, outputs=[{"type": "IMAGE"}])
    nodes = [noise(9), bypassed, save(2, 5), node(3, "passing", mode=2), save(4, 7)]
    graph = convert(nodes, [link(5, 1, 0, 2), link(6, 9, 0, 1), link(7, 3, 0, 4)], passing)
    assert set(graph.nodes) == {"9", "2", "4"}
    assert graph.nodes["2"].inputs["images"] == Link("9", 0)
    assert "images" not in graph.nodes["4"].inputs


def test_reroutes_primitives_and_bypassed_nodes_in_a_subgraph(convert: Any) -> None:
    nodes = [
        noise(11, ("width", "INT", 1)),
        node(12, "PrimitiveNode", [24, "fixed"]),
        node(13, "Reroute", None, [("", "*", 2)]),
        node(14, "Picky", [2], [("images", "IMAGE", 3)], mode=4, outputs=[{"type": "IMAGE"}]),
    ]
    links = [link(1, 12, 0, 11), link(2, 11, 0, 13), link(3, 13, 0, 14), link(4, 14, 0, OUT)]
    graph = convert([node(1, "box"), save(2, 5)], [link(5, 1, 0, 2)], subgraph("box", nodes, links, {}, [4]))
    assert set(graph.nodes) == {"1:11", "2"}
    assert graph.nodes["1:11"].inputs["width"] == 24
    assert graph.nodes["2"].inputs["images"] == Link("1:11", 0)


def test_an_id_that_a_file_has_twice_is_changed_as_the_page_does_it(convert: Any) -> None:
    again = subgraph("again", [noise(2), noise(11)], [link(4, 2, 0, OUT)], {}, [4])
    nodes = [node(1, "maker"), save(2, 5), node(3, "again"), save(4, 6)]
    graph = convert(nodes, [link(5, 1, 0, 2), link(6, 3, 0, 4)], MAKER, again, last_node_id=30)
    assert set(graph.nodes) == {"1:11", "2", "3:31", "3:32", "4"}
    assert graph.nodes["4"].inputs["images"] == Link("3:31", 0)


def test_set_reaches_into_subgraphs(convert: Any, classes: dict[str, type]) -> None:
    graph = convert([node(1, "maker"), save(2, 5)], [link(5, 1, 0, 2)], MAKER)
    schemas = {name: schema.from_class(name, classes[name]) for name in graph.class_types()}
    changes = [Setting.parse("1:11.seed=5"), Setting.parse("Noise.width=16")]
    inputs = settings.apply(graph, changes, schemas).nodes["1:11"].inputs
    assert (inputs["seed"], inputs["width"]) == (5, 16)
    with pytest.raises(WorkflowError, match=r"no node '1'. Its nodes: 1:11 \(Noise\)\.$"):
        settings.apply(graph, [Setting.parse("1.text=x")], schemas)


PASSING = node(8, "Reroute", None, [("", "*", 4)])


def holding(*kinds: str) -> Json:
    return subgraph("big", [node(n, kind) for n, kind in enumerate(kinds, 50)], [])


def doubling(levels: int) -> list[Json]:
    """2 to the power of `levels` nodes from a file of a few lines."""
    pairs = [
        {**subgraph(f"s{n}", [node(100 + 2 * n, f"s{n + 1}"), node(101 + 2 * n, f"s{n + 1}")], [])}
        for n in range(levels)
    ]
    return [*pairs, subgraph(f"s{levels}", [noise(99)], [])]


@pytest.mark.parametrize(
    ("nodes", "links", "subgraphs", "message"),
    [
        ([node(1, "big")], [], [holding("big")], r"The subgraph 'My big' holds itself, at node 1:50"),
        ([node(1, "big")], [], [holding("b"), subgraph("b", [node(70, "big")], [])], "holds itself, at node 1:50:70"),
        ([node(1, "s0")], [], doubling(40), "unfold to more than 100,000 nodes"),
        ([node(1, "s0")], [], [subgraph(f"s{n}", [node(n + 9, f"s{n + 1}")], []) for n in range(300)], "too deep"),
        ([node(1, "9f3b2c1d-0000-4000-8000-0123456789ab")], [], [], "Node 1 is a subgraph that the file does not de"),
        ([node(1, "big")], [], [subgraph("big", [noise(5), noise(5)], [])], "Two nodes of the subgraph 'My big' have"),
        ([node(1, "maker"), save(2, 5)], [link(5, 1, 7, 2)], [MAKER], None),
        (
            [node(1, "big"), save(2, 5)],
            [link(5, 1, 0, 2)],
            [subgraph("big", [], [link(4, 77, 0, OUT)], {}, [4])],
            "Link 1:4 of the workflow leads nowhere",
        ),
        (
            [node(1, "big")],
            [],
            [subgraph("big", [noise(8, ("text", "*", 4))], [link(4, IN, 3, 8)])],
            "A link takes input 3 of the subgraph 'My big', which has 0",
        ),
        (
            [node(1, "big", [], [("a", "*", 5)]), save(2, 6)],
            [link(5, 1, 0, 1), link(6, 1, 0, 2)],
            [subgraph("big", [PASSING], [link(4, IN, 0, 8), link(3, 8, 0, OUT)], {"a": [4]}, [3])],
            "run in a circle",
        ),
    ],
)  # fmt: skip
def test_broken_and_hostile_subgraphs(
    convert: Any, nodes: list[Json], links: list[Json], subgraphs: list[Json], message: str | None
) -> None:
    if message is None:
        assert "images" not in convert(nodes, links, *subgraphs).nodes["2"].inputs
        return
    with pytest.raises(WorkflowError, match=message):
        convert(nodes, links, *subgraphs)
