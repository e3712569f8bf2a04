"""Nodes as ComfyUI sees them, and as a process without ComfyUI runs them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import comfyui_onediff_guard
import pytest
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.nodes import inputs
from comfyui_onediff_guard.pipelines.compile.backends import BACKENDS, MODES
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.precision.guard import OnFailure
from comfyui_onediff_guard.precision.policy import Precision


def test_options_of_nodes_equal_those_of_lower_layers():
    assert tuple(p.value for p in Precision) == inputs.PRECISIONS
    assert tuple(p.value for p in OnFailure) == inputs.ON_FAILURE
    assert inputs.BACKENDS == BACKENDS
    assert inputs.COMPILE_MODES == MODES
    assert set(inputs.SCHEDULERS) == set(COGVIDEOX.schedulers)


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_every_node_has_description_and_tooltips(name):
    cls = NODE_CLASS_MAPPINGS[name]
    schema = cls.INPUT_TYPES()
    assert re.fullmatch("OneDiff Guard/(Load|Sample|Guard|Diagnose|Native)", cls.CATEGORY)
    assert cls.DESCRIPTION and name in NODE_DISPLAY_NAME_MAPPINGS
    takes_id = "node_id" in inspect.signature(getattr(cls, cls.FUNCTION)).parameters
    assert not takes_id or schema["hidden"]["node_id"] == "UNIQUE_ID"
    assert len(cls.RETURN_TYPES) == len(cls.RETURN_NAMES) == len(cls.OUTPUT_TOOLTIPS) and all(cls.OUTPUT_TOOLTIPS)
    for group in ("required", "optional"):
        for input_name, (_, options) in schema.get(group, {}).items():
            assert options.get("tooltip"), f"{name}.{input_name}"


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_nodes_that_show_something_show_it_again_when_cached(name):
    """ComfyUI shows it again for output nodes, and for nodes with HAS_INTERMEDIATE_OUTPUT."""
    cls = NODE_CLASS_MAPPINGS[name]
    shows = getattr(cls, cls.FUNCTION).__annotations__["return"] == "dict[str, Any]"  # else only outputs
    assert getattr(cls, "OUTPUT_NODE", False) + getattr(cls, "HAS_INTERMEDIATE_OUTPUT", False) == shows


def test_rerun_is_shown_on_node(model_folder, without_comfyui):
    sampled = GRAPHS["svd"].sample(GRAPHS["svd"].load(model_folder("svd", "inside"), precision="fp16"))
    assert "2 steps, 1 recomputed in fp32" in sampled["ui"]["text"][0]
    finding = sampled["ui"]["text"][0].splitlines()[1]
    assert re.fullmatch(
        r"Step 1: a value reached [1-9][0-9]+,[0-9]{3} \(fp16 ends at 65,504\) in time_embedding.linear_1\. "
        r"Recomputed in fp32; overflow protection from here on\.",
        finding,
    )
    assert sampled["ui"]["onediff_guard"][0]["reruns"] == 1
    assert "\nstep 2 (t=" in sampled["result"][1]


def test_nodes_never_change_their_input_handle(model_folder, without_comfyui):
    pipeline = GRAPHS["2b"].load(model_folder("2b"), precision="fp16")
    (stopping,) = call("NaNGuard", pipeline=pipeline, on_failure="stop")["result"]
    assert (pipeline.policy.on_failure, stopping.policy.on_failure) == (OnFailure.RERUN, OnFailure.STOP)
    assert stopping.store is pipeline.store
    with pytest.raises(AttributeError):
        stopping.policy = pipeline.policy


def test_markup_is_escaped_for_page(comfyui):
    text = "<img src=x onerror=a()> & [words](http://b) [[words|http://b]]"
    host.say("1", text)
    with host.Progress(1, "1") as progress:
        progress.update(1, text)
    assert comfyui.texts == [("1", text)] * 2
    assert not any(mark in sent for sent in comfyui.sent for mark in "<>[")


@pytest.mark.parametrize(("client", "shown"), [("a page", [("1", "a text", "a page")]), (None, [])])
def test_text_goes_only_to_page_that_queued_run(client, shown, monkeypatch):
    texts = []
    server = SimpleNamespace(
        client_id=client, send_progress_text=lambda *sent: texts.append((sent[1], sent[0], *sent[2:]))
    )
    monkeypatch.setattr(host, "server", lambda: server)
    host.say("1", "a text")
    assert texts == shown


def test_run_in_comfyui_uses_its_folders_and_shows_progress(comfyui, model_folder):
    graph = GRAPHS["2b"]
    pipeline = graph.load(model_folder("2b"), precision="fp32")
    sampled = graph.sample(pipeline, graph.encode(pipeline)["result"], steps=2, node_id="5")
    graph.decode(pipeline, sampled["result"][0])
    prompts, steps, chunks = [(0, 2), (1, 2), (2, 2)], [(0, 2), (1, 2), (2, 2)], [(0, 1), (1, 1)]
    moved = [[mark for n, mark in enumerate(bar) if mark[0] or bar[n + 1][0]] for bar in comfyui.bars]
    assert moved == [prompts, steps, chunks], "and each bar stays at 0 while weights are read"
    assert ("5", "step 1/2 · fp32") in comfyui.texts
    assert re.match(
        "loading the weights of transformer, [0-9.]+ MB", next(text for node, text in comfyui.texts if node == "5")
    )
    assert comfyui.texts[-1][1].startswith("fp32, as you chose; 2 steps, all fine")


def test_relative_python_module_is_folder_of_pack() -> None:
    modules = {node.RELATIVE_PYTHON_MODULE for node in NODE_CLASS_MAPPINGS.values()}
    assert modules == {f"custom_nodes.{Path(comfyui_onediff_guard.__file__).parent.name}"}
