"""A NaN Guard that precision 'fp16 (plain)' switches off: nodes and the log warn about it."""

from __future__ import annotations

import logging

import pytest
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.precision.policy import Component

IDLE = "does nothing here: precision 'fp16 (plain)' switches it off. Choose 'auto' or 'fp16'."


@pytest.fixture
def opened(comfyui, model_folder):
    def load(precision, on_failure):
        pipeline = GRAPHS["2b"].load(model_folder("2b"), precision=precision)
        return call("NaNGuard", pipeline=pipeline, on_failure=on_failure)["result"][0] if on_failure else pipeline

    return load


@pytest.mark.parametrize("on_failure", ["rerun", "stop"])
def test_idle_guard_warns_on_its_node_and_in_log(comfyui, opened, model_folder, caplog, on_failure):
    pipeline = GRAPHS["2b"].load(model_folder("2b"), precision="fp16 (plain)")
    guard = {"pipeline": pipeline, "on_failure": on_failure, "node_id": "7", "exact_fp32": False}
    node = NODE_CLASS_MAPPINGS["OneDiffGuardNaNGuard"]
    with caplog.at_level(logging.WARNING):
        node().apply(**guard)
    line = f"The NaN Guard, set to '{on_failure}', {IDLE}"
    assert comfyui.texts == [("7", line)]
    assert [record.message for record in caplog.records if IDLE in record.message] == [line]


def test_nodes_after_idle_guard_warn_too(opened, caplog):
    """Also if they set a precision of their own."""
    graph, pipeline = GRAPHS["2b"], opened("fp16", "rerun")
    encoded = graph.encode(pipeline, precision="fp32")
    assert IDLE not in encoded["ui"]["text"][0] and not caplog.records
    with caplog.at_level(logging.WARNING):
        sampled = graph.sample(pipeline, encoded["result"], precision="fp16 (plain)", steps=1)
    assert IDLE in sampled["ui"]["text"][0] and IDLE in sampled["result"][1]
    assert sampled["ui"]["onediff_guard"][0]["warnings"] == [f"The NaN Guard, set to 'rerun', {IDLE}"]
    assert [record.message for record in caplog.records].count(f"The NaN Guard, set to 'rerun', {IDLE}") == 1


@pytest.mark.parametrize(
    ("precision", "on_failure"),
    [("fp16 (plain)", "off"), ("fp16 (plain)", None), ("fp16", "rerun"), ("fp32", "stop"), ("auto", "rerun")],
)
def test_active_or_disabled_guard_gives_no_warning(comfyui, opened, precision, on_failure):
    pipeline = opened(precision, on_failure)
    for component in pipeline.store.model.variant.components:
        assert pipeline.idle_guard(pipeline.plan(Component(component))) == ()
    assert not comfyui.texts
