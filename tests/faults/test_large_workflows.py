"""Large workflows are handled in linear time and without recursion."""

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
    """Each node uses the one before it twice: 2 ** size paths."""
    nodes = {str(n): mix(n - 1, n - 1) for n in range(1, size)}
    return {"0": LOADER, **nodes, "end": saver(str(size - 1))}


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
    """A chain of reroutes with as many nodes at its end."""
    chain = [ui_node(n, "Reroute", [("", "*", n)], ["*"]) for n in range(1, size)]
    links: list[Any] = [[n, n - 1, 0, n, 0, "*"] for n in range(1, size)]
    ends = range(size, 2 * size)
    return {
        "nodes": [LOAD_IMAGE, *chain, *(ui_saver(n, n) for n in ends)],
        "links": links + [[n, size - 1, 0, n, 0, "*"] for n in ends],
    }


def bypassed(size: int) -> Json:
    """One bypassed node with `size` inputs and outputs, each of its own type."""
    kinds = [f"kind {n}" for n in range(size)]
    inputs = [(kind, kind, 0) for kind in kinds]
    middle = ui_node(1, "Anything", inputs, kinds[::-1], mode=4)
    ends = range(2, size + 2)
    return {
        "nodes": [LOAD_IMAGE, middle, *(ui_saver(n, n) for n in ends)],
        "links": [[0, 0, 0, 1, 0, "IMAGE"], *([n, 1, n - 2, n, 0, "IMAGE"] for n in ends)],
    }


def run_ui(data: Json) -> None:
    ui_format.convert(data, validate.known_schemas(ui_format.types_in(data)[0], CLASSES)).to_api()


SHAPES: list[tuple[Callable[[Json], None], Callable[[int], Json]]] = [
    *((run_api, shape) for shape in (ladder, many_faults, circle)),
    *((run_ui, shape) for shape in (reroutes, bypassed)),
]


def steps(run: Callable[[Json], None], data: Json) -> int:
    """Number of Python lines executed, in this pack and libraries. A rejection's message is short."""
    count, told = 0, ""

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(data)
    except WorkflowError as error:
        told = str(error)
    finally:
        sys.settrace(before)
    assert len(told) < 5000 and told.count("\n") < 30
    return count


@pytest.mark.parametrize(("run", "shape"), SHAPES, ids=[shape.__name__ for _, shape in SHAPES])
def test_executed_lines_grow_linearly(run: Callable[[Json], None], shape: Callable[[int], Json]) -> None:
    """More nodes than Python's recursion limit."""
    steps(run, shape(4))  # warm-up
    small, double = (steps(run, shape(size)) for size in (sys.getrecursionlimit(), 2 * sys.getrecursionlimit()))
    assert small < double < 2.2 * small
