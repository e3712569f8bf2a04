"""Which attention kernel a run takes, and what its report says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import attention
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.compile.warm_up import Size, warm_up
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.attention import Choice, Timing
from comfyui_onediff_guard.precision.attention_kernels import KERNELS
from comfyui_onediff_guard.precision.policy import Precision
from comfyui_onediff_guard.precision.report import RunReport
from torch.profiler import profile

OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}
MODELS = ("2b", "1.5-i2v", "cogview3", "cogview4", "svd", "wan")
SIZES = {"2b": Size(64, 48, 9), "1.5-i2v": Size(64, 48, 13), "svd": Size(64, 64, 2), "wan": Size(64, 48, 9)}


def opened(folder: Any, how: CompileOptions, precision: str = "bf16") -> PipelineHandle:
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement()}
    handle = load(folder, family_of(folder), precision=Precision(precision), backend="eager", **options)
    return replace(handle, compile_options=how)


def run(handle: PipelineHandle, size: Size) -> tuple[RunReport, set[str]]:
    with torch.inference_mode():
        if handle.family.prompt:
            encode_prompts(handle, ["", ""])  # its text encoder attends too
        with profile() as profiled:
            (warmed,) = warm_up(handle, [size])
    ran = {event.key for event in profiled.key_averages()}
    return warmed.report, {name for name, operator in OPERATORS.items() if operator in ran}


@pytest.mark.parametrize("model", MODELS)
def test_every_family_can_be_measured(model_folder: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "math", replace(KERNELS["math"], timed=True))  # a CPU has no other choice
    handle = opened(model_folder(model), CompileOptions(attention="measured"))
    handle.store.attention.clear()
    report, _ = run(handle, SIZES.get(model, Size(64, 64)))
    assert report.backend_reason.endswith("attention: PyTorch's own choice, measured the fastest here")
    assert handle.store.attention
    for choice in handle.store.attention.values():
        assert choice.timings and all(timing.seconds > 0 for timing in choice.timings.values()), choice


def test_a_size_is_measured_once(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(attention, "measure", lambda calls, _device: measured.append(calls) or FASTER)
    handle = opened(model_folder("2b"), CompileOptions(attention="measured"))
    handle.store.attention.clear()
    for size in (Size(64, 48, 9), Size(96, 48, 9), Size(64, 48, 9)):
        report, kernels = run(handle, size)
        assert "attention: math, measured 2.00 times as fast" in report.backend_reason and "math" in kernels
    assert len(measured) == 2
    blocks = len(handle.store.module("transformer", "bf16").transformer_blocks)
    assert [sum(calls.values()) for calls in measured] == [blocks] * 2


FASTER = Choice("math", {"auto": Timing(2.0, 0.1), "math": Timing(1.0, 0.1)})


def test_a_kernel_that_is_named_is_used_by_the_attempts_and_not_by_reruns(model_folder: Any) -> None:
    report, kernels = run(opened(model_folder("2b"), CompileOptions(attention="math")), SIZES["2b"])
    assert kernels == {"math"} and report.backend_reason == "asked for: not compiled; attention: math"
    failing = opened(model_folder("2b", "inside"), CompileOptions(attention="flash"), "fp16")
    report, _ = run(failing, SIZES["2b"])
    assert report.reruns == 1, "in fp32, by a kernel that takes it"


def test_without_a_name_it_is_pytorchs_choice(model_folder: Any) -> None:
    report, kernels = run(opened(model_folder("2b"), CompileOptions()), SIZES["2b"])
    assert kernels == {"flash"} and "attention" not in report.backend_reason


def test_backends_with_attention_of_their_own_are_not_measured(model_folder: Any) -> None:
    handle = opened(model_folder("2b"), CompileOptions(attention="measured"))
    handle = replace(handle, backend=BackendChoice("nexfort", "asked for"))
    how, said = attention.with_attention(handle.compile_options, handle.store, "nexfort", "fp16", {})
    assert how.attention == "" and said == "attention: not measured, nexfort has its own"
