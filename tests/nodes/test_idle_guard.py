"""A NaN Guard that is set to act, where precision 'fp16 (plain)' leaves it nothing to do: nobody has to find out."""

from __future__ import annotations

import logging

import pytest
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.precision.policy import Component

SAYS = "does nothing here: precision 'fp16 (plain)' switches it off. Choose 'auto' or 'fp16'."


@pytest.fixture
def opened(comfyui, model_folder):
    def load(precision, on_failure):
        pipeline = GRAPHS["2b"].load(model_folder("2b"), precision=precision)
        return call("NaNGuard", pipeline=pipeline, on_failure=on_failure)["result"][0] if on_failure else pipeline

    return load


@pytest.mark.parametrize("on_failure", ["rerun", "stop"])
def test_it_says_so_itself_and_in_the_log(comfyui, opened, model_folder, caplog, on_failure):
    pipeline = GRAPHS["2b"].load(model_folder("2b"), precision="fp16 (plain)")
    guard = {"pipeline": pipeline, "on_failure": on_failure, "node_id": "7", "exact_fp32": False}
    node = NODE_CLASS_MAPPINGS["OneDiffGuardNaNGuard"]
    assert node.INPUT_TYPES()["hidden"] == {"node_id": "UNIQUE_ID"}
    with caplog.at_level(logging.WARNING):
        node().apply(**guard)
    line = f"The NaN Guard, set to '{on_failure}', {SAYS}"
    assert comfyui.texts == [("7", line)]
    assert [record.message for record in caplog.records if SAYS in record.message] == [line]


def test_the_nodes_behind_it_say_so_too(opened, caplog):
    """Also where they have a precision of their own."""
    graph, pipeline = GRAPHS["2b"], opened("fp16", "rerun")
    encoded = graph.encode(pipeline, precision="fp32")
    assert SAYS not in encoded["ui"]["text"][0] and not caplog.records
    with caplog.at_level(logging.WARNING):
        sampled = graph.sample(pipeline, encoded["result"], precision="fp16 (plain)", steps=1)
    assert SAYS in sampled["ui"]["text"][0] and SAYS in sampled["result"][1]
    assert sampled["ui"]["onediff_guard"][0]["warnings"] == [f"The NaN Guard, set to 'rerun', {SAYS}"]
    assert [record.message for record in caplog.records].count(f"The NaN Guard, set to 'rerun', {SAYS}") == 1


@pytest.mark.parametrize(
    ("precision", "on_failure"),
    [("fp16 (plain)", "off"), ("fp16 (plain)", None), ("fp16", "rerun"), ("fp32", "stop"), ("auto", "rerun")],
)
def test_nothing_is_said_where_it_acts_or_shall_not(comfyui, opened, precision, on_failure):
    pipeline = opened(precision, on_failure)
    for component in pipeline.store.model.variant.components:
        assert pipeline.idle_guard(pipeline.plan(Component(component))) == ()
    assert not comfyui.texts
