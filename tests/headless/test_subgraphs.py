"""Subgraphs are unfolded as in the browser: ids "1:2:3", links in and out of them, and widgets shown on them."""

from __future__ import annotations

from typing import Any

import pytest
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.workflow import settings
from comfyui_onediff_guard.headless.workflow.graph import Graph, Link
from comfyui_onediff_guard.headless.workflow.settings import Setting
from test_ui_format import GET, SCHEMAS, SET, Json, get_node, link, node, noise, reroute, save, set_node
from test_ui_format import convert as convert_file

IN, OUT = -10, -20


def host(node_id: int, kind: str, *inputs: Any, **more: Any) -> Json:
    return node(node_id, kind, more.pop("widgets", []), inputs, ["IMAGE"] * 2, **more)


def subgraph(name: str, nodes: list[Json], links: list[Json], inputs: Json = {}, outputs: list[int] = []) -> Json:  # noqa: B006
    return {
        "id": name,
        "name": f"My {name}",
        "nodes": nodes,
        "links": links,
        "inputs": [{"name": name, "type": "*", "linkIds": ids} for name, ids in inputs.items()],
        "outputs": [{"name": f"out{n}", "type": "IMAGE", "linkIds": [each]} for n, each in enumerate(outputs)],
    }


MAKER = subgraph("maker", [noise(11, ("text", "STRING", 1))], [link(1, IN, 11), link(2, 11, OUT)], {"text": [1]}, [2])
OUTER = subgraph(
    "outer",
    [host(21, "maker", ("text", "*", 3), widgets=["a fox"])],
    [link(3, IN, 21), link(4, 21, OUT)],
    {"t": [3]},
    [4],
)
ONE = [link(5, 1, 2)]  # from a subgraph node to a saver


def convert(nodes: list[Json], links: list[Json], *subgraphs: Json, **more: Any) -> Graph:
    return convert_file(nodes, *links, definitions={"subgraphs": list(subgraphs)}, **more)


def test_inner_node_ids_start_with_subgraph_id() -> None:
    graph = convert([host(1, "maker"), save(5)], ONE, MAKER)
    assert set(graph.nodes) == {"1:11", "2"}
    assert graph.nodes["2"].inputs["images"] == Link("1:11", 0)
    assert graph.nodes["1:11"].inputs["text"] == "a cat"
    assert graph.nodes["1:11"].label == "node 1:11 (Noise) in 'My maker'"
    assert graph.nodes["2"].label == "node 2 (SaveImage)"


def test_nested_and_reused_subgraphs_are_unfolded() -> None:
    pair = subgraph(
        "pair",
        [host(21, "maker"), host(22, "maker", title="Second"), node(23, "Picky", [2], [("images", "IMAGE", 3)])],
        [link(3, 22, 23), link(4, 21, OUT), link(6, 23, OUT)],
        {},
        [4, 6],
    )
    graph = convert([host(1, "pair"), save(5), save(7, node_id=3)], [*ONE, link(7, 1, 3, 1)], pair, MAKER)
    assert set(graph.nodes) == {"1:21:11", "1:22:11", "1:23", "2", "3"}
    assert [graph.nodes[node_id].inputs["images"].node for node_id in ("2", "3", "1:23")] == [
        "1:21:11", "1:23", "1:22:11",
    ]  # fmt: skip
    assert graph.nodes["1:22:11"].label == "node 1:22:11 (Noise) in 'Second'"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ({"widgets_values": ["a dog"]}, "a dog"),
        ({"widgets_values": []}, "a cat"),
        ({"widgets_values": None}, "a cat"),
        ({"widgets_values": ["a dog"], "properties": {"proxyWidgets": [["11", "text"]]}}, "a dog"),
        ({"widgets_values": [4, "a dog"], "properties": {"proxyWidgets": [["11", "width"], ["-1", "text"]]}}, "a dog"),
        ({"widgets_values": [], "properties": {"proxyWidgets": [["11", "text"]]}}, "a cat"),
        ({"widgets_values": ["a dog"], "properties": {"proxyWidgets": [["99", "text"]]}}, "a dog"),
        ({"widgets_values": ["a dog"], "properties": {"proxyWidgets": "[["}}, "a dog"),
    ],
)
def test_widget_of_subgraph_node_sets_inner_value(shown: Json, text: str) -> None:
    """In both formats of ComfyUI's page. Without a value on the subgraph, the inner node keeps its own."""
    graph = convert([host(1, "maker") | shown, save(5)], ONE, MAKER)
    assert graph.nodes["1:11"].inputs["text"] == text


def test_proxy_widgets_set_inner_values() -> None:
    """Also the value of a primitive. A second use of the same subgraph keeps its own values."""
    inside = [noise(11, ("width", "INT", None), ("text", "STRING", 3)), node(12, "PrimitiveNode", ["a fox"])]
    folded = subgraph("box", inside, [link(2, 11, OUT), link(3, 12, 11)], {}, [2])
    properties = {"proxyWidgets": [["11", "width"], ["12", "value"]]}
    nodes = [host(1, "box", widgets=[24, "a dog"], properties=properties), host(3, "box"), save(5), save(6, node_id=4)]
    graph = convert(nodes, [*ONE, link(6, 3, 4)], folded)
    values = [graph.nodes[node_id].inputs[name] for node_id in ("1:11", "3:11") for name in ("width", "text")]
    assert values == [24, "a dog", 48, "a fox"]


@pytest.mark.parametrize(
    ("outside", "expected"),
    [
        (host(1, "outer", widgets=["a dog"]), "a dog"),
        (host(1, "outer"), "a fox"),
        (host(1, "outer", ("t", "*", 6), widgets=["a dog"]), Link("9", 1)),
    ],
)
def test_outer_widget_or_link_sets_input_of_nested_node(outside: Json, expected: Any) -> None:
    graph = convert([noise(9), outside, save(5)], [*ONE, link(6, 9, 1, 1)], OUTER, MAKER)
    assert graph.nodes["1:21:11"].inputs["text"] == expected


def test_muted_subgraph_is_removed_and_bypassed_one_passes_link() -> None:
    passing = subgraph("passing", [noise(11)], [link(2, 11, OUT)], {"images": []}, [2])
    bypassed = host(1, "passing", ("images", "IMAGE", 6), mode=4)
    nodes = [noise(9), bypassed, save(5), host(3, "passing", mode=2), save(7, node_id=4)]
    graph = convert(nodes, [*ONE, link(6, 9, 1), link(7, 3, 4)], passing)
    assert set(graph.nodes) == {"9", "2", "4"}
    assert graph.nodes["2"].inputs["images"] == Link("9", 0)
    assert "images" not in graph.nodes["4"].inputs


def test_reroutes_primitives_and_bypasses_resolve_in_subgraph() -> None:
    nodes = [
        noise(11, ("width", "INT", 1)),
        node(12, "PrimitiveNode", [24, "fixed"]),
        reroute(13, 2),
        node(14, "Picky", [2], [("images", "IMAGE", 3)], ["IMAGE"], mode=4),
    ]
    links = [link(1, 12, 11), link(2, 11, 13), link(3, 13, 14), link(4, 14, OUT)]
    graph = convert([host(1, "box"), save(5)], ONE, subgraph("box", nodes, links, {}, [4]))
    assert set(graph.nodes) == {"1:11", "2"}
    assert graph.nodes["1:11"].inputs["width"] == 24
    assert graph.nodes["2"].inputs["images"] == Link("1:11", 0)


def test_duplicate_ids_are_renumbered_as_in_browser() -> None:
    again = subgraph("again", [noise(2), noise(11)], [link(4, 2, OUT)], {}, [4])
    nodes = [host(1, "maker"), save(5), host(3, "again"), save(6, node_id=4)]
    graph = convert(nodes, [*ONE, link(6, 3, 4)], MAKER, again, last_node_id=30)
    assert set(graph.nodes) == {"1:11", "2", "3:31", "3:32", "4"}
    assert graph.nodes["4"].inputs["images"] == Link("3:31", 0)


def test_set_reaches_into_subgraphs() -> None:
    graph = convert([host(1, "maker"), save(5)], ONE, MAKER)
    changes = [Setting.parse("1:11.seed=5"), Setting.parse("Noise.width=16")]
    inputs = settings.apply(graph, changes, SCHEMAS).nodes["1:11"].inputs
    assert (inputs["seed"], inputs["width"]) == (5, 16)
    with pytest.raises(WorkflowError, match=r"no node '1'. Its nodes: 1:11 \(Noise\)\.$"):
        settings.apply(graph, [Setting.parse("1.text=x")], SCHEMAS)


# Set and Get nodes of KJNodes

INNER = subgraph("inner", [get_node(14, "pic"), save(9, node_id=12)], [link(9, 14, 12)])
SETS = subgraph("sets", [host(21, "inner"), noise(22), set_node(23, "pic", 1)], [link(1, 22, 23)])
NONE = subgraph("sets", [host(21, "inner"), noise(22), set_node(23, "own", 1)], [link(1, 22, 23)])
FED = subgraph("sets", [host(21, "inner"), set_node(23, "pic", 1)], [link(1, IN, 23)], {"in": [1]})
PASSES = subgraph(
    "sets",
    [set_node(13, "pic", 1), get_node(14, "pic"), save(9, node_id=12)],
    [link(1, IN, 13), link(9, 14, 12)],
    {"in": [1]},
)


@pytest.mark.parametrize(
    ("nodes", "subgraphs", "expected"),
    [
        ([*SET, host(5, "sets")], [NONE, INNER], {"5:21:12": "1"}),  # from an outer canvas
        ([host(5, "sets")], [SETS, INNER], {"5:21:12": "5:22"}),
        ([*SET, *GET, save(9), host(5, "sets", ("in", "IMAGE", 8))], [PASSES], {"5:12": "1", "2": "1"}),
        ([SET[0], *GET, save(9), host(5, "sets", ("in", "IMAGE", 8))], [PASSES], {"5:12": "1", "2": None}),
        ([SET[0], host(5, "sets", ("in", "IMAGE", 8))], [FED, INNER], {"5:21:12": None}),  # as in KJNodes
    ],
)
def test_get_node_reads_own_canvas_before_outer_ones(
    nodes: list[Json], subgraphs: list[Json], expected: dict[str, str | None]
) -> None:
    graph = convert(nodes, [link(1, 1, 3), link(9, 4, 2), link(8, 1, 5)], *subgraphs)
    found = {node_id: graph.nodes[node_id].inputs.get("images") for node_id in expected}
    assert found == {node_id: source and Link(source, 0) for node_id, source in expected.items()}


def holding(*kinds: str) -> Json:
    return subgraph("big", [host(n, kind) for n, kind in enumerate(kinds, 50)], [])


def doubling(levels: int) -> list[Json]:
    """2 to the power of `levels` nodes from a file of a few lines."""
    pairs = [
        subgraph(f"s{n}", [host(100 + 2 * n, f"s{n + 1}"), host(101 + 2 * n, f"s{n + 1}")], []) for n in range(levels)
    ]
    return [*pairs, subgraph(f"s{levels}", [noise(99)], [])]


BIG, DEEP = [host(1, "big")], [subgraph(f"s{n}", [host(n + 9, f"s{n + 1}")], []) for n in range(300)]
CIRCLE = subgraph("big", [reroute(8, 4)], [link(4, IN, 8), link(3, 8, OUT)], {"a": [4]}, [3])


@pytest.mark.parametrize(
    ("nodes", "links", "subgraphs", "message"),
    [
        (BIG, [], [holding("big")], r"The subgraph 'My big' contains itself, or is nested too deeply"),
        (BIG, [], [holding("b"), subgraph("b", [host(70, "big")], [])], "contains itself"),
        ([host(1, "s0")], [], doubling(40), "expand to more than 100,000 nodes"),
        ([host(1, "s0")], [], DEEP, "too deep"),
        ([host(1, "9f3b2c1d-0000-4000-8000-0123456789ab")], [], [], "Node 1 is a subgraph that the file does not de"),
        (BIG, [], [subgraph("big", [noise(5), noise(5)], [])], "Two nodes of the subgraph 'My big' have"),
        (
            [*BIG, save(5)],
            ONE,
            [subgraph("big", [], [link(4, 77, OUT)], {}, [4])],
            "Link 1:4 of the workflow has no source node",
        ),
        (
            BIG,
            [],
            [subgraph("big", [noise(8, ("text", "*", 4))], [link(4, IN, 8, 3)])],
            "A link uses input 3 of the subgraph 'My big', which has 0",
        ),
        ([host(1, "big", ("a", "*", 5)), save(6)], [link(5, 1, 1), link(6, 1, 2)], [CIRCLE], "form a cycle"),
        (
            [*SET, host(5, "sets")],
            [link(1, 1, 3)],
            [SETS, INNER],
            "Node 5:21:14 gets 'pic', but 2 Set nodes set it",
        ),
    ],
)
def test_invalid_subgraphs_are_rejected(
    nodes: list[Json], links: list[Json], subgraphs: list[Json], message: str
) -> None:
    with pytest.raises(WorkflowError, match=message):
        convert(nodes, links, *subgraphs)


def test_link_from_missing_subgraph_output_is_dropped() -> None:
    assert "images" not in convert([host(1, "maker"), save(5)], [link(5, 1, 2, 7)], MAKER).nodes["2"].inputs
