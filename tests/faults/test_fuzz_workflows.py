"""Fuzzing of workflows in both formats and of `--set`: readable and sendable, or rejected with a place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import comfyui_nodes
import pytest
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.comparison import precisions
from comfyui_onediff_guard.headless.errors import HeadlessError
from comfyui_onediff_guard.headless.hosts import core_nodes
from comfyui_onediff_guard.headless.workflow import settings, ui_format, validate
from comfyui_onediff_guard.headless.workflow.graph import Graph, Link, from_api, is_ui_format, read_json
from comfyui_onediff_guard.headless.workflow.settings import Setting
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mutations import NASTY, mutated, mutated_text
from PIL import Image
from tiers import by_tier

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
PATHS = [*sorted(WORKFLOWS.glob("*.json")), *sorted((WORKFLOWS / "api").glob("*.json"))]
NESTED = {  # a subgraph in a subgraph, with an input, an output and both kinds of widget
    "last_node_id": 9,
    "nodes": [
        {"id": 1, "type": "outer", "widgets_values": ["y", 7], "properties": {"proxyWidgets": [["5", "prefix"]]},
         "inputs": [{"name": "a", "type": "IMAGE", "link": 3}, {"name": "prefix", "type": "STRING"}]},
        {"id": 2, "type": "LoadImage", "widgets_values": ["example.png"], "outputs": [{"type": "IMAGE"}]},
        {"id": 4, "type": "PreviewImage", "inputs": [{"name": "images", "type": "IMAGE", "link": 4}]},
    ],
    "links": [[3, 2, 0, 1, 0, "IMAGE"], [4, 1, 0, 4, 0, "IMAGE"]],
    "definitions": {"subgraphs": [
        {"id": "outer", "name": "Outer", "inputs": [{"name": "a", "linkIds": [1]}, {"name": "prefix", "linkIds": [2]}],
         "outputs": [{"name": "out", "linkIds": [3]}],
         "nodes": [{"id": 5, "type": "inner", "widgets_values": ["x"], "inputs": [
             {"name": "a", "type": "IMAGE", "link": 1}, {"name": "prefix", "type": "STRING", "link": 2}]}],
         "links": [{"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 5},
                   {"id": 2, "origin_id": -10, "origin_slot": 1, "target_id": 5},
                   {"id": 3, "origin_id": 5, "origin_slot": 0, "target_id": -20}]},
        {"id": "inner", "name": "Inner", "inputs": [{"name": "a", "linkIds": [1]}, {"name": "prefix", "linkIds": [2]}],
         "outputs": [{"name": "out", "linkIds": [4]}],
         "nodes": [{"id": 5, "type": "SaveImage", "widgets_values": ["x"], "inputs": [
             {"name": "images", "type": "IMAGE", "link": 3},
             {"name": "filename_prefix", "type": "STRING", "link": 2, "widget": {"name": "filename_prefix"}}]},
             {"id": 6, "type": "Reroute", "inputs": [{"name": "", "link": 1}], "outputs": [{"type": "*"}]}],
         "links": [{"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 6},
                   {"id": 2, "origin_id": -10, "origin_slot": 1, "target_id": 5},
                   {"id": 3, "origin_id": 6, "origin_slot": 0, "target_id": 5},
                   {"id": 4, "origin_id": 6, "origin_slot": 0, "target_id": -20}]},
    ]},
}  # fmt: skip
SEEDS = [*(json.loads(path.read_text(encoding="utf-8")) for path in PATHS), NESTED]
CLASSES = {**core_nodes.NODE_CLASS_MAPPINGS, **NODE_CLASS_MAPPINGS, **comfyui_nodes.NODE_CLASS_MAPPINGS}
NAMES = sorted(
    {f"{kind}.{name}" for kind, node in CLASSES.items() for group in node.INPUT_TYPES().values() for name in group}
    | {f"{number}.{name}" for number in range(9) for name in ("model", "images", "seed", "steps", "fps", "image")}
)
anything = st.one_of(st.text(), st.text(st.characters(categories=["Cs", "Cc", "Lu"])), st.binary().map(repr))
values = st.one_of(
    anything, st.sampled_from(NASTY).map(json.dumps), st.sampled_from(["NaN", "1e999", "-1", "[[", "1" * 5000])
)
arguments = st.one_of(
    st.builds("{}={}".format, st.sampled_from(NAMES), values), st.builds("{}.{}={}".format, anything, anything, values)
)


@lru_cache
def damaged(number: int) -> st.SearchStrategy[bytes]:
    structure = mutated(SEEDS[number], most=6).map(lambda value: json.dumps(value).encode())
    return st.one_of(structure, structure, mutated_text(SEEDS[number]))


files = st.integers(0, len(SEEDS) - 1).flatmap(damaged)


def fuzzed(examples: int) -> Callable[[Any], Any]:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return hypothesis_settings(max_examples=examples, deadline=None, suppress_health_check=slow)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], Graph]]:
    """read(content of a file) → graph, in folders that hold the models and images of the workflows."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("CogVideoX-2b", "CogVideoX-5b", "CogView4-6B"):
        (folder / name).mkdir()
        (folder / name / "model_index.json").write_text("{}", encoding="utf-8")
    Image.new("RGB", (8, 8)).save(folder / "example.png")

    def read_file(data: bytes) -> Graph:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".json") as file:
            Path(file.name).write_bytes(data)
            workflow = read_json(Path(file.name))
        if is_ui_format(workflow):
            known = validate.known_schemas(ui_format.types_in(workflow)[0], CLASSES)
            return ui_format.convert(workflow, known)
        return from_api(workflow)

    with host.plain_folders(models=[folder], input=folder, output=folder):
        yield read_file


def refusal(call: Callable[[], object]) -> str:
    """The error message; "" if nothing was rejected."""
    try:
        call()
    except HeadlessError as error:
        told = str(error)
        assert 20 < len(told) < 10_000
        return told
    return ""


def check(graph: Graph, *changes: str) -> None:
    """Everything that a command does with a workflow before it runs."""
    assert_can_be_sent(graph)
    schemas = validate.known_schemas(graph.class_types(), CLASSES)
    graph = settings.apply(graph, map(Setting.parse, changes), schemas)
    assert_can_be_sent(graph)
    refusal(lambda: precisions.comparable(graph, schemas, (), ("bf16",)).in_precision("bf16"))
    told = refusal(lambda: assert_can_be_sent(validate.plan(graph, CLASSES).graph))
    assert "could not be checked" not in told, "a node's own check raised"


def assert_can_be_sent(graph: Graph) -> None:
    json.dumps([graph.to_api(), graph.workflow], allow_nan=False).encode()


def test_undamaged_nested_workflow_is_read_correctly(read: Callable[[bytes], Graph]) -> None:
    graph = read(json.dumps(NESTED).encode())
    assert set(graph.nodes) == {"2", "4", "1:5:10"}
    assert graph.nodes["1:5:10"].inputs == {"filename_prefix": "y", "images": Link("2", 0)}
    assert graph.nodes["4"].inputs == {"images": Link("2", 0)}


@fuzzed(by_tier(33_000, 220))
@example(data=b"[" * 100_000, change="1.steps=1")
@example(data=b'{"1": {"class_type": "CreateVideo", "inputs": {"images": ["1", 0], "fps": 1e400}}}', change="1.a=1")
@given(data=files, change=arguments)
def test_damaged_workflow_is_sendable_or_rejected(read: Callable[[bytes], Graph], data: bytes, change: str) -> None:
    def run() -> None:
        graph = read(data)
        refusal(lambda: check(graph))
        check(graph, change)

    refusal(run)


@fuzzed(by_tier(5_000, 50))
@example(number=0, changes=["1.text=\udcff"])
@given(number=st.integers(0, len(SEEDS) - 1), changes=st.lists(arguments, min_size=1, max_size=3))
def test_set_arguments_are_accepted_or_rejected(
    read: Callable[[bytes], Graph], number: int, changes: list[str]
) -> None:
    refusal(lambda: check(read(json.dumps(SEEDS[number]).encode()), *changes))
