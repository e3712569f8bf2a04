"""Graphs that a run compiles: counted by dynamo, in inference mode, as ComfyUI runs its nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.report import RunReport
from lora_models import training
from small_runs import opened, sampled

SIZES = {  # width, height, frames
    "2b": [(96, 64, 9), (128, 64, 9), (96, 96, 17), (64, 128, 9), (160, 96, 25)],
    "1.5": [(96, 64, 13), (64, 64, 13), (96, 48, 21), (64, 48, 5)],
    "cogview3": [(64, 64, 1), (128, 64, 1), (96, 96, 1), (64, 128, 1)],
    "cogview4": [(96, 64, 1), (128, 64, 1), (96, 96, 1), (64, 128, 1)],  # never as many image tokens as text tokens
    "wan": [(96, 64, 9), (128, 64, 9), (96, 96, 17), (64, 128, 9)],
}
pytestmark = pytest.mark.usefixtures("traced_alone")


def compiling(model: str, precision: str = "fp32") -> PipelineHandle:
    return opened(model, precision=precision, backend="inductor")


def run(handle: PipelineHandle, size: tuple[int, int, int], prompt: str = "a red kite", **settings: Any) -> RunReport:
    width, height, frames = size
    options = {"steps": 1, "seed": 0, "guidance_scale": 6.0} | settings
    with torch.inference_mode():
        (positive, negative), _ = encode_prompts(handle, [prompt, ""])
        return sample(handle, positive, negative, SampleSettings(width, height, frames=frames, **options))[1]


@pytest.mark.parametrize("model", SIZES)
def test_changing_seed_steps_guidance_or_prompt_does_not_recompile(model: str) -> None:
    handle, (size, *_) = compiling(model), SIZES[model]
    assert run(handle, size).graphs == 1, "identical blocks share one graph"
    for changed in ({"seed": 3}, {"steps": 3}, {"guidance_scale": 2.5}, {"prompt": "a boat on a lake"}):
        assert run(handle, size, **changed).graphs == 0, changed


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_second_size_compiles_once_and_later_sizes_do_not(model: str, precision: str) -> None:
    """fp16: with all layers scaled, by scales that the first run learned."""
    handle, (first, second, *more) = compiling(model, precision), SIZES[model]
    graphs = [run(handle, size).graphs or 0 for size in [first] * (2 if precision == "fp16" else 1)]
    assert sum(graphs) == 1
    assert run(handle, second).graphs == 1, "its graph takes any size"
    assert [run(handle, size).graphs for size in (*more, first, second)] == [0] * (len(more) + 2)


@pytest.mark.parametrize("model", SIZES)
def test_option_dynamic_compiles_one_graph_for_all_sizes(model: str) -> None:
    handle = replace(compiling(model), compile_options=CompileOptions(dynamic=True))
    assert [run(handle, size).graphs for size in SIZES[model]] == [1] + [0] * (len(SIZES[model]) - 1)


def test_switching_options_back_does_not_recompile() -> None:
    handle, (size, *_) = compiling("2b"), SIZES["2b"]
    other = replace(handle, compile_options=CompileOptions(dynamic=True))
    assert [run(each, size).graphs for each in (handle, other, handle, other)] == [1, 1, 0, 0]
    assert "backend: inductor (as you chose; one graph for all sizes), 0 graphs" in run(other, size).text()


def test_other_strength_or_lora_of_same_shapes_does_not_recompile(tmp_path: Path) -> None:
    handle, (size, *_) = compiling("2b"), SIZES["2b"]
    denoiser, train = handle.store.module("transformer", "fp32"), training(tmp_path)
    one, other, wider = (train(denoiser, seed=1), train(denoiser, seed=2), train(denoiser, seed=3, r=8, lora_alpha=8))
    assert run(handle, size).graphs == 1, "without a LoRA"

    def graphs(*loras: Lora) -> int | None:
        return run(replace(handle, loras=loras), size).graphs

    assert graphs(Lora(one, 0.5)) == 1
    assert [graphs(Lora(one, 1.0)), graphs(Lora(one, -0.3)), graphs(Lora(other, 0.5)), graphs()] == [0, 0, 0, 0]
    assert len([loras for _, loras, *_ in handle.store.compiled if loras]) == 1, "of the last LoRA alone"
    assert [graphs(Lora(wider, 1.0)), graphs(Lora(wider, 0.2)), graphs(Lora(one, 0.5))] == [1, 0, 0], "another rank"
    assert [graphs(Lora(one, 1.0), Lora(other, 0.5)), graphs(Lora(other, 0.1), Lora(one, 2.0))] == [1, 0], "two at once"


@torch._dynamo.config.patch(recompile_limit=1)
def test_every_block_of_a_unet_is_compiled() -> None:
    """They are of several kinds and sizes."""
    handle, messages = opened("svd", backend="inductor"), list[str]()
    with torch.inference_mode():
        reports = [sampled(handle, (64, 64, 2), steps=1, tell=messages.append)[1] for _ in range(2)]
    compiling = [line for line in messages if line.startswith("inductor")]
    assert [line.split(" · ")[0] for line in compiling] == [f"inductor: compiling block {n} of 9" for n in range(1, 10)]
    kinds = 5  # of blocks, each with its own code: more graphs mean several for one code
    assert reports[0].graphs is not None and reports[0].graphs > kinds and reports[1].graphs == 0
