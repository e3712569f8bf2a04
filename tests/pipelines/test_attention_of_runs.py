"""The attention kernel of a run, and what its report says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.precision.attention import Attended
from comfyui_onediff_guard.precision.report import RunReport
from overflows import fails_in_half
from small_runs import SMALL, opened, prompts, sampled
from torch.profiler import profile

OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}


def run(handle: PipelineHandle, kernel: str) -> tuple[RunReport, set[str]]:
    """The report, and the kernels that ran."""
    with torch.inference_mode():
        prompts(handle)  # its text encoder attends too
        with profile() as profiled:
            _, report = sampled(replace(handle, compile_options=CompileOptions(attention=kernel)), SMALL)
    ran = {event.key for event in profiled.key_averages()}
    return report, {name for name, operator in OPERATORS.items() if operator in ran}


def test_named_kernel_is_used_by_attempts_but_not_by_reruns() -> None:
    report, kernels = run(opened("2b", precision="bf16"), "math")
    assert kernels == {"math"} and report.backend_reason == "as you chose: nothing is compiled; attention: math"
    failing = opened("2b", precision="fp16")
    hook = failing.store.module("transformer", "fp16").proj_out.register_forward_hook(fails_in_half)
    report, _ = run(failing, "flash")
    hook.remove()
    assert report.reruns == 1, "in fp32, by a kernel that supports it"


def test_auto_leaves_choice_of_kernel_to_pytorch() -> None:
    report, kernels = run(opened("2b", precision="bf16"), "")
    assert kernels == {"flash"} and "attention" not in report.backend_reason


def test_compiled_blocks_are_separate_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.nn.Module] = []
    monkeypatch.setattr(backends, "_compile", lambda shown, *_: made.append(shown.block) or shown)
    handle = replace(opened("2b"), backend=BackendChoice("inductor", "as you chose"))
    handle.store.compiled.clear()
    try:
        report, kernels = run(handle, "math")
        assert "attention: math" in report.backend_reason and "math" in kernels
        assert made and all(isinstance(block, Attended) and block.kernel == "math" for block in made)
        number = len(made)
        run(handle, "")
        assert len(made) == 2 * number and not any(isinstance(block, Attended) for block in made[number:])
    finally:
        handle.store.compiled.clear()
