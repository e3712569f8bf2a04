"""Dynamic inputs: an option of a drop-down adds inputs (`format.codec`), and a list grows (`images.image0`)."""

from __future__ import annotations

from typing import Any

import pytest
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.workflow import schema, settings, ui_format
from comfyui_onediff_guard.headless.workflow.graph import Graph, GraphNode, Link
from comfyui_onediff_guard.headless.workflow.settings import Setting
from comfyui_onediff_guard.trust.foreign import Unreadable

Json = dict[str, Any]


def combo(**options: Json) -> list[Any]:
    return [schema.DYNAMIC_COMBO, {"options": [{"key": key, "inputs": inputs} for key, inputs in options.items()]}]


ENCODING = combo(auto={"required": {}}, again={"required": {"crf": ["FLOAT", {"default": 23.0}]}})
CODEC = combo(auto={"required": {}}, h264={"optional": {"encoding": ENCODING}})
PALETTE = {"palette": ["STRING", {"default": "warm"}], "like": ["IMAGE", {}]}
GROWING = {"template": {"input": {"required": {"image": ["IMAGE", {}]}}, "prefix": "image", "min": 1, "max": 3}}
INFO = {
    "input": {
        "required": {
            "video": ["VIDEO", {}],
            "format": combo(auto={"required": {"codec": CODEC}}, gif={"required": PALETTE, "optional": None}),
            "prefix": ["STRING", {"default": "x"}],
        },
        "optional": {"images": [schema.AUTOGROW, GROWING]},
    },
    "output": [],
    "output_node": True,
}
SAVE = schema.from_object_info("Save", INFO)


def convert(widgets: Any, *inputs: tuple[str, int]) -> dict[str, Any]:
    slots = [{"name": name, "type": "IMAGE", "link": link} for name, link in inputs]
    nodes = [{"id": 1, "type": "Save", "widgets_values": widgets, "inputs": slots}, {"id": 2, "type": "Make"}]
    links = [[link, 2, 0, 1, 0, "IMAGE"] for _, link in inputs]
    data = {"nodes": nodes, "links": links}
    graph = ui_format.convert(data, {"Save": SAVE, "Make": schema.from_object_info("Make", {"output": ["IMAGE"]})})
    return dict(graph.nodes["1"].inputs)


@pytest.mark.parametrize(
    ("widgets", "expected"),
    [
        (["auto", "auto", "p"], {"format": "auto", "format.codec": "auto", "prefix": "p"}),
        (
            ["auto", "h264", "again", 18, "p"],
            {
                "format": "auto",
                "format.codec": "h264",
                "format.codec.encoding": "again",
                "format.codec.encoding.crf": 18,
                "prefix": "p",
            },
        ),
        (["gif", "cold", "p"], {"format": "gif", "format.palette": "cold", "prefix": "p"}),
        (["gif"], {"format": "gif", "format.palette": "warm", "prefix": "x"}),
        (["new", "p"], {"format": "new", "prefix": "p"}),
        ([[1, 2], "p"], {"format": [1, 2], "prefix": "p"}),
        (None, {"format": "auto", "format.codec": "auto", "prefix": "x"}),
        (
            {"format": "gif", "format.palette": "cold"},
            {"format": "gif", "format.palette": "cold", "prefix": "x"},
        ),
    ],
)
def test_widget_values_are_assigned_to_inputs_of_chosen_option(widgets: Any, expected: Json) -> None:
    assert convert(widgets) == expected


def test_links_to_dynamic_inputs_keep_their_names() -> None:
    inputs = convert(["gif", "cold", "p"], ("format.like", 5), ("images.image1", 6))
    assert (inputs["format.like"], inputs["images.image1"]) == (Link("2", 0), Link("2", 0))


def changed(inputs: Json, *changes: str) -> Json:
    graph = settings.apply(
        Graph({"1": GraphNode("1", "Save", inputs, "v1.5 save")}), list(map(Setting.parse, changes)), {"Save": SAVE}
    )
    return dict(graph.nodes["1"].inputs)


AUTO = {"format": "auto", "format.codec": "auto"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["Save.format.codec=auto"], AUTO),
        (["v1.5 save.format.codec=auto"], AUTO),
        (["Save.format=auto"], AUTO),
        (["Save.format.codec=h264"], {**AUTO, "format.codec": "h264", "format.codec.encoding": "auto"}),
        (
            ["Save.format.codec.encoding=again", "1.format.codec=h264"],
            {
                **AUTO,
                "format.codec": "h264",
                "format.codec.encoding": "again",
                "format.codec.encoding.crf": 23.0,
            },
        ),
        (["Save.format=gif"], {"format": "gif", "format.palette": "warm"}),
        (["Save.format.palette=7", "Save.format=gif"], {"format": "gif", "format.palette": "7"}),
        (["Save.images.image2=null"], {**AUTO, "images.image2": None}),
    ],
)
def test_set_accepts_dotted_input_names(changes: list[str], expected: Json) -> None:
    assert changed(AUTO, *changes) == expected


def test_links_stay_with_same_option_and_go_with_another() -> None:
    linked = {"format": "gif", "format.palette": Link("2", 0), "format.like": Link("2", 0)}
    assert changed(linked, "Save.format=gif") == linked
    assert changed(linked, "Save.format=auto") == AUTO


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "Save.format.palette=1",
            r"node 1 \(v1.5 save\) has no input 'format.palette'. Its inputs: video, format, format",
        ),
        ("Save.images.image3=1", "has no input 'images.image3'"),
        ("Load.format.codec=1", "no node 'Load.format'"),
    ],
)
def test_set_rejects_unknown_dotted_names(change: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        changed(AUTO, change)


def test_ambiguous_node_name_before_dotted_input_is_rejected() -> None:
    graph = Graph({"1": GraphNode("1", "Save", {}), "2": GraphNode("2", "Save", {})})
    with pytest.raises(WorkflowError, match="'Save' names 2 nodes"):
        settings.apply(graph, [Setting.parse("Save.format.codec=h264")], {"Save": SAVE})


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([schema.DYNAMIC_COMBO], "options is missing"),
        ([schema.DYNAMIC_COMBO, {"options": [{"inputs": {}}]}], r"options\[0\].key is missing"),
        ([schema.AUTOGROW, {"template": 5}], "template is 5"),
        (combo(a={"required": {"b" * 2000: ["INT"]}}), "more than 1,000 letters"),
    ],
)
def test_invalid_schema_of_dynamic_input_is_rejected(declared: Any, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        schema.from_object_info("Save", {"input": {"required": {"format": declared}}})


def test_endless_growing_lists_are_cut_or_rejected() -> None:
    endless = [schema.AUTOGROW, {"template": {"input": {"required": {"image": ["IMAGE"]}}, "max": 10**9}}]
    assert len(schema.from_object_info("x", {"input": {"required": {"a": endless}}}).inputs_with({})) == 100
    many = {f"a{n}": endless for n in range(200)}
    with pytest.raises(Unreadable, match="more than 10,000 inputs"):
        schema.from_object_info("x", {"input": {"required": many}})
