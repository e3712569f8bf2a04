"""What a run compiles anew: counted by dynamo, in inference mode, in which ComfyUI runs its nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from comfyui_onediff_guard.precision.report import RunReport
from lora_models import training

SIZES = {  # width, height, frames
    "2b": [(96, 64, 9), (128, 64, 9), (96, 96, 17), (64, 128, 9), (160, 96, 25)],
    "1.5": [(96, 64, 13), (64, 64, 13), (96, 48, 21), (64, 48, 5)],
    "cogview3": [(64, 64, 1), (128, 64, 1), (96, 96, 1), (64, 128, 1)],
    "cogview4": [(96, 64, 1), (128, 64, 1), (96, 96, 1), (64, 128, 1)],  # never as many image tokens as text tokens
    "wan": [(96, 64, 9), (128, 64, 9), (96, 96, 17), (64, 128, 9)],
}
pytestmark = pytest.mark.usefixtures("traced_alone")


def opened(folder: Any, precision: Precision = Precision.FP32) -> PipelineHandle:
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement()}
    return load(folder, family_of(folder), precision=precision, backend="inductor", **options)


def run(handle: PipelineHandle, size: tuple[int, int, int], prompt: str = "a red kite", **settings: Any) -> RunReport:
    width, height, frames = size
    given = {"steps": 1, "seed": 0, "guidance_scale": 6.0} | settings
    with torch.inference_mode():
        (positive, negative), _ = encode_prompts(handle, [prompt, ""])
        return sample(handle, positive, negative, SampleSettings(width, height, frames=frames, **given))[1]


@pytest.mark.parametrize("model", SIZES)
def test_seed_steps_guidance_and_prompt_compile_nothing_anew(model_folder: Any, model: str) -> None:
    handle, (size, *_) = opened(model_folder(model)), SIZES[model]
    assert run(handle, size).graphs == 1, "identical blocks share one graph"
    for changed in ({"seed": 3}, {"steps": 3}, {"guidance_scale": 2.5}, {"prompt": "a boat on a lake"}):
        assert run(handle, size, **changed).graphs == 0, changed


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_a_new_size_compiles_once_and_all_after_it_nothing(model_folder: Any, model: str, precision: Precision) -> None:
    """fp16: with every layer scaled, as a first call has shown that compiles nothing."""
    handle, (first, second, *more) = opened(model_folder(model), precision), SIZES[model]
    graphs = [run(handle, size).graphs or 0 for size in [first] * (2 if precision is Precision.FP16 else 1)]
    assert sum(graphs) == 1
    assert run(handle, second).graphs == 1, "whose graph takes any size"
    assert [run(handle, size).graphs for size in (*more, first, second)] == [0] * (len(more) + 2)


@pytest.mark.parametrize("model", SIZES)
def test_one_graph_for_all_sizes(model_folder: Any, model: str) -> None:
    handle = replace(opened(model_folder(model)), compile_options=CompileOptions(dynamic=True))
    assert [run(handle, size).graphs for size in SIZES[model]] == [1] + [0] * (len(SIZES[model]) - 1)


def test_a_graph_for_each_size(model_folder: Any) -> None:
    handle = replace(opened(model_folder("cogview3")), compile_options=CompileOptions(dynamic=False))
    sizes = SIZES["cogview3"][:3]
    assert [run(handle, size).graphs for size in (*sizes, *sizes)] == [1] * len(sizes) + [0] * len(sizes)


def test_other_options_and_back_compile_nothing_that_is_there(model_folder: Any) -> None:
    handle, (size, *_) = opened(model_folder("2b")), SIZES["2b"]
    other = replace(handle, compile_options=CompileOptions(dynamic=True))
    assert [run(each, size).graphs for each in (handle, other, handle, other)] == [1, 1, 0, 0]
    assert "backend: inductor (as you chose; one graph for all sizes), 0 graphs" in run(other, size).text()


def test_another_strength_or_another_lora_of_the_same_shapes_compiles_nothing_anew(
    model_folder: Any, tmp_path: Path
) -> None:
    handle, (size, *_) = opened(model_folder("2b")), SIZES["2b"]
    denoiser, train = handle.store.module("transformer", "fp32"), training(tmp_path)
    one, other, wider = (train(denoiser, seed=1), train(denoiser, seed=2), train(denoiser, seed=3, r=8, lora_alpha=8))
    assert run(handle, size).graphs == 1, "without a LoRA"

    def graphs(*loras: Lora) -> int | None:
        return run(replace(handle, loras=loras), size).graphs

    assert graphs(Lora(one, 0.5)) == 1
    assert [graphs(Lora(one, 1.0)), graphs(Lora(one, -0.3)), graphs(Lora(other, 0.5)), graphs()] == [0, 0, 0, 0]
    assert [graphs(Lora(wider, 1.0)), graphs(Lora(wider, 0.2)), graphs(Lora(one, 0.5))] == [1, 0, 0], "another rank"
    assert [graphs(Lora(one, 1.0), Lora(other, 0.5)), graphs(Lora(other, 0.1), Lora(one, 2.0))] == [1, 0], "two at once"


def test_the_report_says_so(model_folder: Any) -> None:
    handle, (size, *_) = opened(model_folder("2b")), SIZES["2b"]
    first, again = run(handle, size), run(handle, size)
    assert "backend: inductor (as you chose), 1 graph compiled anew" in first.text()
    assert "0 graphs compiled anew" in again.text() and again.as_dict()["graphs"] == 0
    eager = run(replace(handle, backend=BackendChoice("eager", "as you chose: not compiled")), size)
    assert eager.graphs is None and "compiled anew" not in eager.text()
