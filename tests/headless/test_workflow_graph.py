"""API-format workflows: reading, order of nodes, writing, and `--set`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.workflow import schema, settings
from comfyui_onediff_guard.headless.workflow.graph import Graph, GraphNode, Link, from_api, is_ui_format, read_json
from comfyui_onediff_guard.headless.workflow.settings import Setting
from hypothesis import given
from hypothesis import strategies as st
from waiting import no_hang


def chain(*links: tuple[str, str]) -> Graph:
    """A graph of links (source, target)."""
    names = {name for link in links for name in link}
    return Graph(
        {
            name: GraphNode(name, "Node", {source: Link(source, 0) for source, target in links if target == name})
            for name in names
        }
    )


def test_api_format_survives_round_trip(workflow: dict[str, Any]) -> None:
    workflow["1"]["inputs"]["list"] = {"__value__": ["1", 0]}
    graph = from_api(workflow)
    assert graph.nodes["2"].inputs["images"] == Link("1", 0)
    assert graph.nodes["1"].inputs["list"] == ["1", 0]
    assert graph.to_api() == workflow
    assert from_api({"prompt": workflow, "client_id": "x"}).to_api() == workflow


def test_order_contains_only_needed_nodes() -> None:
    graph = chain(("a", "b"), ("b", "c"), ("a", "c"), ("a", "unneeded"))
    assert graph.order_for(["c"]) == ["a", "b", "c"]


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda link: link[0] < link[1]), min_size=1))
def test_every_node_comes_after_its_sources(links: set[tuple[int, int]]) -> None:
    graph = chain(*((str(source), str(target)) for source, target in links))
    order = graph.order_for(graph.nodes)
    assert sorted(order) == sorted(graph.nodes)
    assert all(order.index(str(source)) < order.index(str(target)) for source, target in links)


def test_circle_and_link_to_missing_node_are_rejected() -> None:
    with pytest.raises(WorkflowError, match=r"cycle: node .* -> node"):
        chain(("a", "b"), ("b", "c"), ("c", "a")).order_for(["a"])
    lost = Graph({"2": GraphNode("2", "SaveImage", {"images": Link("9", 0)})})
    with pytest.raises(WorkflowError, match="'images' is linked to node 9, which is not in the workflow"):
        lost.order_for(["2"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is not JSON"),
        ("[]", "it holds .*, expected an object"),
        (None, "Cannot read the workflow"),
    ],
)
def test_invalid_workflow_file_is_rejected(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "w.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(WorkflowError, match=message):
        read_json(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "empty"),
        ({"a": 1}, "a is 1: input should be an object"),
        ({"1": {"inputs": {}}}, "1.class_type is missing"),
        ({"1": {"class_type": "X", "inputs": []}}, r"1.inputs is \[\]: input should be an object"),
        ({"1": {"class_type": "X", "_meta": {"title": 3}}}, "1._meta.title is 3"),
        ({"1": {"class_type": "X", "inputs": {"a": {"b": [math.nan]}}}}, "is nan: input should be a finite number"),
    ],
)
def test_invalid_workflow_object_is_rejected(data: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        from_api(data)


def test_node_id_may_be_prompt(workflow: dict[str, Any]) -> None:
    data = {"prompt": workflow["1"]}
    assert from_api(data).to_api() == data
    assert is_ui_format({"nodes": [], "links": []}) and not is_ui_format(data)


def apply(workflow: dict[str, Any], classes: dict[str, type], *arguments: str) -> Graph:
    graph = from_api(workflow)
    schemas = {name: schema.from_class(name, classes[name]) for name in graph.class_types()}
    return settings.apply(graph, [Setting.parse(argument) for argument in arguments], schemas)


@pytest.mark.parametrize(
    ("argument", "node", "name", "value"),
    [
        ("1.width=64", "1", "width", 64),
        ("Some Noise.width=64", "1", "width", 64),
        ("Noise.gain=0.5", "1", "gain", 0.5),
        ("SaveImage.filename_prefix=a=b", "2", "filename_prefix", "a=b"),
        ("1.text=a red fox, at dawn", "1", "text", "a red fox, at dawn"),
        ('1.text="quoted"', "1", "text", "quoted"),
        ("1.text=1e3", "1", "text", "1e3"),
        ("1.text=null", "1", "text", "null"),
        ('1.text=["1", 0]', "1", "text", '["1", 0]'),
        ("1.text=", "1", "text", ""),
        ("1.gain=NaN", "1", "gain", "NaN"),
        ("1.gain=1e999", "1", "gain", "1e999"),
        ("1.mask=" + "[" * 9000, "1", "mask", "[" * 9000),
        ('2.images=["1", 0]', "2", "images", Link("1", 0)),
    ],
)
def test_set_changes_input_and_converts_type(
    workflow: dict[str, Any], classes: dict[str, type], argument: str, node: str, name: str, value: object
) -> None:
    changed = apply(workflow, classes, argument).nodes[node].inputs[name]
    assert changed == value
    assert type(changed) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ('"off"', False), ("0", 0), ('["2", 0]', Link("2", 0)), ("perhaps", None)],
)
def test_set_converts_text_to_boolean(text: str, value: Any) -> None:
    schemas = {"Switch": schema.from_object_info("Switch", {"input": {"required": {"on": ["BOOLEAN", {}]}}})}
    graph, setting = from_api({"1": {"class_type": "Switch"}}), Setting.parse(f"1.on={text}")
    if value is None:
        with pytest.raises(WorkflowError, match="--set on=perhaps: expected true or false"):
            settings.apply(graph, [setting], schemas)
    else:
        assert repr(settings.apply(graph, [setting], schemas).nodes["1"].inputs["on"]) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2024", "2024"), ("true", "true"), ('"2024"', "2024"), ("4", 4), ("5", "5"), ('["2", 0]', Link("2", 0))],
)
def test_set_accepts_options_named_like_json(text: str, value: object) -> None:
    choice = schema.from_object_info("Choice", {"input": {"required": {"which": [["2024", "true", 4]]}}})
    changed = settings.apply(
        from_api({"1": {"class_type": "Choice"}}), [Setting.parse(f"1.which={text}")], {"Choice": choice}
    )
    assert repr(changed.nodes["1"].inputs["which"]) == repr(value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("1.width", "expected NODE.INPUT=VALUE"),
        ("width=3", "expected NODE.INPUT=VALUE"),
        ("1.text=\udcff", "expected UTF-8"),
        ("1.wdith=3", "has no input 'wdith'. Its inputs: width, seed"),
        ("7.width=3", "no node '7'. Its nodes: 1 \\(Some Noise\\), 2 \\(SaveImage\\)"),
        ("a." * 100_000 + "x=1", "no node 'a.a.a"),
        ("SaveImage.filename_prefix=a", r"'SaveImage' names 2 nodes of the workflow \(2, 3\): use the node's id"),
    ],
)
def test_invalid_set_is_rejected(
    workflow: dict[str, Any], classes: dict[str, type], argument: str, message: str
) -> None:
    workflow |= {"3": workflow["2"]} if "SaveImage" in argument else {}
    with pytest.raises(WorkflowError, match=message), no_hang(f"--set {argument[:50]}"):
        apply(workflow, classes, argument)


@pytest.mark.parametrize("value", ["a \ud83d cat", {"deep": ["\udd25"]}, {"__value__": ["\ud83d"]}])
def test_lone_surrogate_in_input_is_rejected(workflow: dict[str, Any], value: Any) -> None:
    workflow["1"]["inputs"]["text"] = value
    with pytest.raises(WorkflowError, match=r"node 1 \(.*\): input 'text' holds half a character"):
        from_api(json.loads(json.dumps(workflow)))


@pytest.mark.parametrize("half", [r"\ud83d", r"\ud83d b", r"\ud83d\u0041", r"\udd25"])
def test_lone_surrogate_in_file_is_rejected_with_line(tmp_path: Path, half: str) -> None:
    (tmp_path / "w.json").write_text(f'{{"1": {{"class_type": "N", "inputs": {{"t": "a {half}"}}}}}}')
    with pytest.raises(WorkflowError, match=r"w.json .*half a character.* line 1"):
        read_json(tmp_path / "w.json")
