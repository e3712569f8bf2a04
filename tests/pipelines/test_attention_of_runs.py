"""Which attention kernel a run takes, and what its report says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.attention import Attended
from comfyui_onediff_guard.precision.policy import Precision
from comfyui_onediff_guard.precision.report import RunReport
from overflows import fails_in_half
from small_runs import prompts, start_of
from torch.profiler import profile

OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}
MODELS = ("2b", "1.5-i2v", "cogview3", "cogview4", "svd", "wan")
Size = tuple[int, int, int]  # width, height, frames
SIZES: dict[str, Size] = {"2b": (64, 48, 9), "1.5-i2v": (64, 48, 13), "svd": (64, 64, 2), "wan": (64, 48, 9)}


def opened(folder: Any, how: CompileOptions, precision: str = "bf16") -> PipelineHandle:
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement()}
    handle = load(folder, family_of(folder), precision=Precision(precision), backend="eager", **options)
    return replace(handle, compile_options=how)


def run(handle: PipelineHandle, size: Size) -> tuple[RunReport, set[str]]:
    width, height, frames = size
    settings = SampleSettings(width, height, 2, 0, frames, 2.0)
    with torch.inference_mode():
        positive, negative = prompts(handle)  # its text encoder attends too
        with profile() as profiled:
            _, report = sample(handle, positive, negative, settings, **start_of(handle, width, height))
    ran = {event.key for event in profiled.key_averages()}
    return report, {name for name, operator in OPERATORS.items() if operator in ran}


def test_a_kernel_that_is_named_is_used_by_the_attempts_and_not_by_reruns(model_folder: Any) -> None:
    report, kernels = run(opened(model_folder("2b"), CompileOptions(attention="math")), SIZES["2b"])
    assert kernels == {"math"} and report.backend_reason == "as you chose: not compiled; attention: math"
    failing = opened(model_folder("2b"), CompileOptions(attention="flash"), "fp16")
    hook = failing.store.module("transformer", "fp16").proj_out.register_forward_hook(fails_in_half)
    report, _ = run(failing, SIZES["2b"])
    hook.remove()
    assert report.reruns == 1, "in fp32, by a kernel that takes it"


def test_auto_is_pytorchs_choice(model_folder: Any) -> None:
    report, kernels = run(opened(model_folder("2b"), CompileOptions(attention="")), SIZES["2b"])
    assert kernels == {"flash"} and "attention" not in report.backend_reason


def test_a_kernel_is_compiled_into_blocks_and_tells_them_apart(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.nn.Module] = []
    monkeypatch.setattr(backends, "_compile", lambda shown, *_: made.append(shown.block) or shown)
    handle = opened(model_folder("2b"), CompileOptions(attention="math"), "fp32")
    handle = replace(handle, backend=BackendChoice("inductor", "as you chose"))
    handle.store.compiled.clear()
    try:
        report, kernels = run(handle, SIZES["2b"])
        assert "attention: math" in report.backend_reason and "math" in kernels
        assert made and all(isinstance(block, Attended) and block.kernel == "math" for block in made)
        number = len(made)
        run(replace(handle, compile_options=CompileOptions()), SIZES["2b"])
        assert len(made) == 2 * number and not any(isinstance(block, Attended) for block in made[number:])
    finally:
        handle.store.compiled.clear()
