"""What inputs of a UI-format workflow get through reroutes, bypassed nodes, and the Set and Get nodes of KJNodes."""

from __future__ import annotations

from typing import Any

import pytest
from comfyui_onediff_guard.headless.errors import UnknownNodesError, WorkflowError
from comfyui_onediff_guard.headless.workflow.graph import Link
from test_ui_page import Json, convert, empty, link, node, save

UPSCALE = [("upscale_model", "UPSCALE_MODEL", 2), ("image", "IMAGE", 1)]


def upscale(mode: int = 4, inputs: Any = UPSCALE, outputs: Any = ("IMAGE",), node_id: int = 6) -> Json:
    return node(node_id, "Upscale", [], inputs, outputs, mode=mode)


def reroute(node_id: int, link_id: int, mode: int = 0, kind: str = "Reroute") -> Json:
    return node(node_id, kind, None, [("", "*", link_id)], ["*"], mode=mode)


LOADER = node(5, "UpscaleLoader", ["a.pth"], (), ["UPSCALE_MODEL"])
FEEDS = [link(1, 1, 6), link(2, 5, 6, 0, "UPSCALE_MODEL")]


@pytest.mark.parametrize(
    ("between", "links"),
    [
        ([], [link(9, 6, 2)]),
        ([reroute(7, 3)], [link(3, 6, 7, 0, "*"), link(9, 7, 2)]),
        ([reroute(7, 3, kind="Reroute (rgthree)")], [link(3, 6, 7, 0, "*"), link(9, 7, 2)]),
        ([reroute(7, 3), reroute(8, 4)], [link(3, 6, 7, 0, "*"), link(4, 7, 8, 0, "*"), link(9, 8, 2)]),
        (
            [node(7, "SetNode", ["pic"], [("*", "*", 3)], ["*"]), node(8, "GetNode", ["pic"], (), ["*"])],
            [link(3, 6, 7, 0, "*"), link(9, 8, 2)],
        ),
    ],
)
def test_a_bypassed_node_hands_on_the_type_that_is_asked_for_behind_reroutes(
    between: list[Json], links: list[Any]
) -> None:
    graph = convert([empty(), LOADER, upscale(), *between, save(9)], *FEEDS, *links)
    assert graph.nodes["2"].inputs["images"] == Link("1", 0)


def test_two_that_ask_behind_one_reroute_get_what_each_asks_for() -> None:
    both = upscale(outputs=["*"])
    target = node(3, "Upscale", [], [("upscale_model", "UPSCALE_MODEL", 8), ("image", "IMAGE", 9)], ["IMAGE"])
    nodes = [empty(), LOADER, both, reroute(7, 3), target]
    graph = convert(nodes, *FEEDS, link(3, 6, 7, 0, "*"), link(8, 7, 3), link(9, 7, 3))
    assert graph.nodes["3"].inputs == {"upscale_model": Link("5", 0), "image": Link("1", 0)}


def test_a_bypassed_node_asks_for_its_own_type_in_turn() -> None:
    """A bypassed node behind a bypassed node, with reroutes between."""
    first, second = upscale(), upscale(inputs=[("upscale_model", "UPSCALE_MODEL", 4), ("image", "IMAGE", 5)], node_id=9)
    nodes = [empty(), LOADER, first, reroute(7, 3), second, save(8)]
    links = [link(3, 6, 7, 0, "*"), link(5, 7, 9), link(4, 5, 9), link(8, 9, 2)]
    assert convert(nodes, *FEEDS, *links).nodes["2"].inputs["images"] == Link("1", 0)


@pytest.mark.parametrize(("mode", "expected"), [(0, Link("1", 0)), (4, Link("1", 0)), (2, None)])
def test_a_reroute_that_is_bypassed_hands_on_and_one_that_is_muted_does_not(mode: int, expected: Link | None) -> None:
    graph = convert([empty(), reroute(7, 3, mode), save(9)], link(3, 1, 7), link(9, 7, 2))
    assert graph.nodes["2"].inputs.get("images") == expected


def test_a_primitive_reaches_no_further_than_a_bypassed_node() -> None:
    bypassed = node(6, "Words", ["x"], [("value", "STRING", 1)], ["STRING"], mode=4)
    nodes = [node(1, "PrimitiveNode", ["a cat"]), bypassed, node(2, "Encode", ["x"], [("text", "STRING", 3)])]
    assert convert(nodes, link(1, 1, 6), link(3, 6, 2)).nodes["2"].inputs["text"] == "x"


# Set and Get


def set_node(node_id: int, name: Any, link_id: int | None, **more: Any) -> Json:
    return node(node_id, "SetNode", [name], [("IMAGE", "IMAGE", link_id)], ["*"], **more)


def get_node(node_id: int, name: Any, **more: Any) -> Json:
    return node(node_id, "GetNode", [name], (), ["IMAGE"], **more)


def subgraph(nodes: list[Json], *links: list[Any], kind: str = "s", inputs: Any = (), outputs: Any = ()) -> Json:
    ports = {
        "inputs": [{"name": name, "type": "*", "linkIds": ids} for name, ids in inputs],
        "outputs": [{"name": f"o{n}", "type": "*", "linkIds": [each]} for n, each in enumerate(outputs)],
    }
    return {"id": kind, "nodes": nodes, "links": list(links), **ports}


SET, GET = [empty(), set_node(3, "pic", 1)], [get_node(4, "pic"), save(9)]
FEED, USE = link(1, 1, 3), link(9, 4, 2)


@pytest.mark.parametrize(
    ("nodes", "links", "expected"),
    [
        ([*SET, *GET], [FEED, USE], Link("1", 0)),
        ([*reversed(GET), *reversed(SET)], [FEED, USE], Link("1", 0)),
        ([empty(), set_node(3, "pic", 1, mode=2), *GET], [FEED, USE], Link("1", 0)),  # it has no say in it
        ([*SET, save(9)], [FEED, link(9, 3, 2)], Link("1", 0)),  # from the Set node itself
        ([*SET, get_node(5, "pic"), set_node(6, "two", 2), get_node(4, "two"), save(9)], None, Link("1", 0)),
        ([empty(mode=2), set_node(3, "pic", 1), *GET], [FEED, USE], None),
        ([*SET, get_node(4, "other"), save(9)], [FEED, USE], None),
        ([*SET, get_node(4, ""), save(9)], [FEED, USE], None),
        ([*SET, get_node(4, 5), save(9)], [FEED, USE], None),
        ([*SET, get_node(4, "pic", mode=2), save(9)], [FEED, USE], None),
        ([empty(), set_node(3, "pic", None), *GET], [USE], None),
    ],
)
def test_a_get_node_gets_what_the_set_node_of_its_name_does(
    nodes: list[Json], links: list[Any] | None, expected: Link | None
) -> None:
    graph = convert(nodes, *(links or [FEED, link(2, 5, 6), USE]))
    assert graph.nodes["2"].inputs.get("images") == expected
    assert not {node.class_type for node in graph.nodes.values()} & {"SetNode", "GetNode"}


def test_a_get_node_in_a_subgraph_takes_from_its_own_canvas_else_from_those_around_it() -> None:
    inner = subgraph([get_node(14, "pic"), save(9, node_id=12)], link(9, 14, 12), kind="inner")
    outer = subgraph([node(21, "inner"), empty(22), set_node(23, "own", 1)], link(1, 22, 23), kind="outer")
    definitions = {"subgraphs": [outer, inner]}
    assert convert([*SET, node(5, "outer")], FEED, definitions=definitions).nodes["5:21:12"].inputs == {
        "filename_prefix": "x",
        "images": Link("1", 0),
    }
    nearer = subgraph([node(21, "inner"), empty(22), set_node(23, "pic", 1)], link(1, 22, 23), kind="outer")
    definitions = {"subgraphs": [nearer, inner]}
    graph = convert([empty(), node(5, "outer")], definitions=definitions)
    assert graph.nodes["5:21:12"].inputs["images"] == Link("5:22", 0)


def test_a_set_node_in_a_subgraph_holds_there_alone_and_passes_on_what_comes_in() -> None:
    inside = subgraph(
        [set_node(13, "pic", 1), get_node(14, "pic"), save(9, node_id=12)],
        *[link(1, -10, 13), link(9, 14, 12)],
        inputs=[("in", [1])],
    )
    definitions = {"subgraphs": [inside]}
    nodes = [empty(), node(5, "s", [], [("in", "IMAGE", 1)]), *GET]
    graph = convert(nodes, link(1, 1, 5), USE, definitions=definitions)
    assert graph.nodes["5:12"].inputs["images"] == Link("1", 0)
    assert "images" not in graph.nodes["2"].inputs


@pytest.mark.parametrize("second", ["own", "around"])
def test_a_name_that_two_set_nodes_have_is_refused_where_it_is_used(second: str) -> None:
    if second == "own":
        nodes: list[Json] = [*SET, set_node(5, "pic", 2), *GET]
        assert "images" not in convert([*nodes[:3], save()], FEED, link(2, 1, 5)).nodes["2"].inputs
        with pytest.raises(WorkflowError, match=r"Node 4 gets 'pic', which 2 Set nodes set\. Rename"):
            convert(nodes, FEED, link(2, 1, 5), USE)
        return
    inner = subgraph([get_node(14, "pic"), save(9, node_id=12)], link(9, 14, 12), kind="inner")
    outer = subgraph([node(21, "inner"), empty(22), set_node(23, "pic", 1)], link(1, 22, 23), kind="outer")
    with pytest.raises(WorkflowError, match="Node 5:21:14 gets 'pic', which 2 Set nodes set"):
        convert([*SET, node(5, "outer")], FEED, definitions={"subgraphs": [outer, inner]})


def test_set_and_get_in_a_circle() -> None:
    with pytest.raises(WorkflowError, match="in a circle"):
        convert([set_node(3, "pic", 1), *GET], link(1, 4, 3), USE)


# What only the browser can do


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node(1, "Label (rgthree)")], r"Node 1 is a 'Label \(rgthree\)', which is in the browser alone"),
        ([node(1, "Load3D", ["a.glb", "", "", "clear", "", 1024, 768])], "Node 1 is a 'Load3D', whose pictures"),
        ([node(1, "Camera", [""])], "Node 1 is a 'Camera', whose pictures"),
        ([node(1, "OfAPack")], "no node type OfAPack. Install its pack there; if only the browser has it"),
        ([node(1, "workflow/two images")], "save it again: that makes a subgraph of it"),
    ],
)
def test_what_only_the_browser_can_do_is_refused_with_what_to_do(nodes: list[Json], message: str) -> None:
    with pytest.raises(WorkflowError, match=message) as refused:
        convert(nodes)
    assert "Export (API)" in str(refused.value)
    assert isinstance(refused.value, UnknownNodesError) == ("OfAPack" in message)


def test_what_only_the_browser_can_do_is_not_missed_where_it_is_muted() -> None:
    assert not convert([node(n, kind, mode=2) for n, kind in enumerate(["Label (rgthree)", "Load3D", "Camera"])]).nodes


def test_a_recorder_that_is_linked_runs() -> None:
    nodes = [empty(), node(2, "Camera", [""], [("image", "IMAGE", 1)])]
    assert convert(nodes, link(1, 1, 2)).nodes["2"].inputs == {"image": Link("1", 0)}
