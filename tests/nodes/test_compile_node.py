"""The OneDiff Compile node: changes how the denoiser is compiled, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
from comfyui_onediff_guard.pipelines.errors import BackendUnavailable


@pytest.fixture
def pipeline(model_folder: Any, without_comfyui: None) -> Any:
    return GRAPHS["2b"].load(model_folder("2b"), precision="fp32", offload="none")


def compile_node(pipeline: Any, **inputs: Any) -> Any:
    return call("Compile", pipeline=pipeline, **inputs)["result"][0]


def test_compile_node_does_not_change_input_pipeline(pipeline: Any) -> None:
    other = compile_node(pipeline, backend="inductor", dynamic="on", mode="max-autotune-no-cudagraphs")
    assert other.compile_options == CompileOptions(True, "max-autotune-no-cudagraphs")
    assert other.backend.name == "inductor" and other.store is pipeline.store
    assert pipeline.backend.name == "eager" and pipeline.compile_options == CompileOptions()


def test_default_inputs_keep_backend_and_reset_options(pipeline: Any) -> None:
    same = compile_node(pipeline)
    assert same.backend is pipeline.backend and same.compile_options == CompileOptions()
    assert compile_node(pipeline, dynamic="off").compile_options == CompileOptions(False)
    assert compile_node(compile_node(pipeline, dynamic="off")).compile_options == CompileOptions(), "the last node wins"


def test_attention_is_choice_of_pytorch_unless_kernel_is_named(pipeline: Any) -> None:
    """Also with `measured`, from files of earlier versions."""
    assert pipeline.compile_options.attention == compile_node(pipeline).compile_options.attention == ""
    for attention, expected in (("auto", ""), ("measured", ""), ("flash", "flash")):
        assert compile_node(pipeline, attention=attention).compile_options.attention == expected


def test_layout_is_that_of_comfyui_unless_chosen(pipeline: Any) -> None:
    assert not compile_node(pipeline).compile_options.channels_last
    assert compile_node(pipeline, layout="channels-last").compile_options == CompileOptions(channels_last=True)
    pipeline.store.placement.channels_last = True  # --force-channels-last
    assert compile_node(pipeline).compile_options.channels_last


def test_unavailable_backend_is_refused_by_name(pipeline: Any) -> None:
    with pytest.raises(BackendUnavailable, match="Backend 'oneflow' does not work here: oneflow runs on CUDA"):
        compile_node(pipeline, backend="oneflow")


def test_unavailable_attention_kernel_is_refused_by_name(pipeline: Any) -> None:
    with pytest.raises(BackendUnavailable, match="Attention 'sage' does not work here: SageAttention runs on CUDA"):
        compile_node(pipeline, attention="sage")
