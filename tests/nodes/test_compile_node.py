"""OneDiff Compile: another way to compile, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
from comfyui_onediff_guard.pipelines.errors import BackendUnavailable


@pytest.fixture
def pipeline(model_folder: Any, without_comfyui: None) -> Any:
    return GRAPHS["2b"].load(model_folder("2b"), precision="fp32", offload="none")


def compile_node(pipeline: Any, **given: Any) -> Any:
    return call("Compile", pipeline=pipeline, **given)["result"][0]


def test_the_pipeline_on_the_wire_is_not_changed(pipeline: Any) -> None:
    other = compile_node(pipeline, backend="inductor", dynamic="on", mode="max-autotune-no-cudagraphs")
    assert other.compile_options == CompileOptions(True, "max-autotune-no-cudagraphs")
    assert other.backend.name == "inductor" and other.store is pipeline.store
    assert pipeline.backend.name == "eager" and pipeline.compile_options == CompileOptions()


def test_what_is_left_as_it_is(pipeline: Any) -> None:
    same = compile_node(pipeline)
    assert same.backend is pipeline.backend and same.compile_options == CompileOptions()
    assert compile_node(pipeline, dynamic="off").compile_options == CompileOptions(False)
    assert compile_node(compile_node(pipeline, dynamic="off")).compile_options == CompileOptions(), "the last counts"


def test_attention_is_pytorchs_choice_unless_a_kernel_is_named(pipeline: Any) -> None:
    """So it is too with `measured`, which files of earlier versions say."""
    assert pipeline.compile_options.attention == compile_node(pipeline).compile_options.attention == ""
    for attention, expected in (("auto", ""), ("measured", ""), ("flash", "flash")):
        assert compile_node(pipeline, attention=attention).compile_options.attention == expected


def test_the_layout_is_comfyuis_unless_something_else_is_said(pipeline: Any) -> None:
    assert not compile_node(pipeline).compile_options.channels_last
    assert compile_node(pipeline, layout="channels-last").compile_options == CompileOptions(channels_last=True)
    pipeline.store.placement.channels_last = True  # --force-channels-last
    assert compile_node(pipeline).compile_options.channels_last


def test_a_backend_that_does_not_work_here_is_named(pipeline: Any) -> None:
    with pytest.raises(BackendUnavailable, match="Backend 'oneflow' does not work here: oneflow runs on CUDA"):
        compile_node(pipeline, backend="oneflow")


def test_a_kernel_of_attention_that_is_not_to_be_had_here_is_named(pipeline: Any) -> None:
    with pytest.raises(BackendUnavailable, match="Attention 'sage' does not work here: SageAttention runs on CUDA"):
        compile_node(pipeline, attention="sage")
