"""Workflows of any size and shape cost steps in proportion to their size, and no recursion."""

# ruff: noqa: N802 - ComfyUI's names

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from comfyui_onediff_guard.headless.comparison import precisions
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.hosts import core_nodes
from comfyui_onediff_guard.headless.workflow import ui_format, validate
from comfyui_onediff_guard.headless.workflow.graph import from_api
from tiers import drawn

LARGE = drawn(100_000, 10_000)
Json = dict[str, Any]


class Load:
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> Json:
        return {"required": {"precision": (["auto", "fp32", "bf16"],)}}


class Mix:
    RETURN_TYPES = ("VIDEO",)

    @classmethod
    def INPUT_TYPES(cls) -> Json:
        return {"required": {"a": ("VIDEO,IMAGE",), "b": ("VIDEO,IMAGE",)}, "optional": {"c": ("*",)}}


CLASSES: dict[str, type] = {"Load": Load, "Mix": Mix, **core_nodes.NODE_CLASS_MAPPINGS}
LOADER = {"class_type": "Load", "inputs": {"precision": "auto"}}


def saver(source: str) -> Json:
    inputs = {"video": [source, 0], "filename_prefix": "x", "format": "auto", "codec": "auto"}
    return {"class_type": "SaveVideo", "inputs": inputs}


def mix(a: int | str, b: int | str) -> Json:
    return {"class_type": "Mix", "inputs": {"a": [str(a), 0], "b": [str(b), 0]}}


def ladder(size: int) -> Json:
    """Each node takes the one before it twice: as many ways through it as 2 to the power of its length."""
    nodes = {str(n): mix(n - 1, n - 1) for n in range(1, size)}
    return {"0": LOADER, **nodes, "end": saver(str(size - 1))}


def many_savers(size: int) -> Json:
    return {"0": LOADER, "1": mix(0, 0), **{f"s{n}": saver("1") for n in range(size)}}


def many_loaders(size: int) -> Json:
    nodes = {str(n): LOADER for n in range(size)}
    return {**nodes, **{f"m{n}": mix(n, n) for n in range(size)}, "end": saver("m0")}


def many_faults(size: int) -> Json:
    return {str(n): {"class_type": "SaveVideo", "inputs": {"x" * 500: n}} for n in range(size)}


def circle(size: int) -> Json:
    return {str(n): mix((n + 1) % size, (n + 1) % size) for n in range(size)} | {"end": saver("0")}


def run_api(data: Json) -> None:
    graph = from_api(data)
    validate.plan(graph, CLASSES)
    precisions.comparable(graph, validate.known_schemas(graph.class_types(), CLASSES), (), ("bf16",)).in_precision(
        "bf16"
    )


def ui_node(node_id: int, kind: str, inputs: list[Any] = [], outputs: list[str] = [], **more: Any) -> Json:  # noqa: B006
    slots = [{"name": name, "type": type_, "link": link} for name, type_, link in inputs]
    return {"id": node_id, "type": kind, "inputs": slots, "outputs": [{"type": type_} for type_ in outputs], **more}


def ui_saver(node_id: int, link: int) -> Json:
    return ui_node(node_id, "SaveImage", [("images", "IMAGE", link)], widgets_values=["x"])


LOAD_IMAGE = ui_node(0, "LoadImage", [], ["IMAGE", "MASK"], widgets_values=["a.png", "image"])


def reroutes(size: int) -> Json:
    """A chain of reroutes, and as many nodes at its far end."""
    chain = [ui_node(n, "Reroute", [("", "*", n)], ["*"]) for n in range(1, size)]
    links: list[Any] = [[n, n - 1, 0, n, 0, "*"] for n in range(1, size)]
    ends = range(size, 2 * size)
    return {
        "nodes": [LOAD_IMAGE, *chain, *(ui_saver(n, n) for n in ends)],
        "links": links + [[n, size - 1, 0, n, 0, "*"] for n in ends],
    }


def bypassed(size: int) -> Json:
    """One node with as many inputs and outputs, of as many types, each other than the one beside it."""
    kinds = [f"kind {n}" for n in range(size)]
    inputs = [(kind, kind, 0) for kind in kinds]
    middle = ui_node(1, "Anything", inputs, kinds[::-1], mode=4)
    ends = range(2, size + 2)
    return {
        "nodes": [LOAD_IMAGE, middle, *(ui_saver(n, n) for n in ends)],
        "links": [[0, 0, 0, 1, 0, "IMAGE"], *([n, 1, n - 2, n, 0, "IMAGE"] for n in ends)],
    }


def many_subgraphs(size: int) -> Json:
    subgraphs = [{"id": f"s{n}"} for n in range(size)]
    nodes = [ui_node(n, "SaveImage", [], widgets_values=["x"] * 3) for n in range(size)]
    return {"nodes": nodes, "links": [], "definitions": {"subgraphs": subgraphs}, "extra": {"groupNodes": {}}}


def link(number: int, origin: int, target: int, slot: int = 0) -> Json:
    return {"id": number, "origin_id": origin, "origin_slot": slot, "target_id": target, "target_slot": 0}


def subgraph(kind: str, nodes: list[Json], links: list[Json], **ports: Any) -> Json:
    return {"id": kind, "nodes": nodes, "links": links, **ports}


def used_often(size: int) -> Json:
    """One subgraph, as many times, each after the one before it."""
    passing = ui_node(0, "Reroute", [("", "*", 1)], ["*"])
    ports = {"inputs": [{"name": "a", "linkIds": [1]}], "outputs": [{"name": "b", "linkIds": [2]}]}
    inside = subgraph("s", [passing], [link(1, -10, 0), link(2, 0, -20)], **ports)
    hosts = [ui_node(n, "s", [("a", "*", n)], ["*"]) for n in range(1, size)]
    return {
        "nodes": [LOAD_IMAGE, *hosts, ui_saver(size, size)],
        "links": [link(n, n - 1, n) for n in range(1, size + 1)],
        "definitions": {"subgraphs": [inside]},
    }


def widgets_shown(size: int) -> Json:
    """A subgraph with as many inputs, each for a widget in it, shown in both ways."""
    nodes = [ui_node(n, "SaveImage", [("filename_prefix", "STRING", n)], widgets_values=["x"]) for n in range(size)]
    ports = [{"name": f"p{n}", "linkIds": [n]} for n in range(size)]
    shown = [[str(n), "filename_prefix"] for n in range(size)]
    host = ui_node(0, "s", [], properties={"proxyWidgets": shown}, widgets_values=["y"] * size)
    inside = subgraph("s", nodes, [link(n, -10, n, n) for n in range(size)], inputs=ports)
    return {"nodes": [host], "definitions": {"subgraphs": [inside]}}


def run_ui(data: Json) -> None:
    ui_format.convert(data, validate.known_schemas(ui_format.class_types(data), CLASSES)).to_api()


SHAPES: list[tuple[Callable[[Json], None], Callable[[int], Json]]] = [
    *((run_api, shape) for shape in (ladder, many_savers, many_loaders, many_faults, circle)),
    *((run_ui, shape) for shape in (reroutes, bypassed, many_subgraphs, used_often, widgets_shown)),
]


def steps(run: Callable[[Json], None], data: Json) -> int:
    """How many lines of ours and of the libraries' Python run, refused or not."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(data)
    except WorkflowError:
        pass
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("run", "shape"),
    [pytest.param(*each, id=each[1].__name__) for each in SHAPES if each[1] is not reroutes],  # which are bounded
)
def test_steps_grow_as_the_workflow_does(run: Callable[[Json], None], shape: Callable[[int], Json]) -> None:
    steps(run, shape(4))  # what is done once only
    small, double = (steps(run, shape(size)) for size in (100, 200))
    assert small < double < 2.2 * small


@pytest.mark.parametrize(("run", "shape"), SHAPES, ids=[shape.__name__ for _, shape in SHAPES])
def test_a_large_one_is_taken_or_refused_in_a_few_lines(
    run: Callable[[Json], None], shape: Callable[[int], Json]
) -> None:
    try:
        run(shape(LARGE))
    except WorkflowError as error:
        told = str(error)
        assert len(told) < 5000 and told.count("\n") < 30
