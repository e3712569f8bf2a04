"""Warm Up: what it compiled, later runs find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.compile.warm_up import STEPS, Size, sizes_of, warm_up
from comfyui_onediff_guard.pipelines.errors import BadSize
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.trust.message import BadInput
from PIL import Image

pytestmark = pytest.mark.usefixtures("traced_alone")


def opened(folder: Any, precision: str = "fp32", backend: str = "inductor") -> PipelineHandle:
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement()}
    return load(folder, family_of(folder), precision=Precision(precision), backend=backend, **options)


def graphs_of_a_run(handle: PipelineHandle, size: Size, *, guided: bool = True) -> int | None:
    """As a sampler would run it, with a prompt of its own."""
    prompted = handle.family.prompt is not None
    scale, more = (6.0 if guided else 1.0), {} if prompted else {"max_guidance_scale": 3.0 if guided else 1.0}
    settings = SampleSettings(size.width, size.height, 3, 5, size.frames, scale if prompted else None, more=more)
    with torch.inference_mode():
        positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0] if prompted else (None, None)
        image = Image.new("RGB", (size.width, size.height), "orange") if handle.family.takes_image else None
        return sample(handle, positive, negative, settings, image=image)[1].graphs


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("2b", [Size(64, 48, 9), Size(96, 64, 9)]),
        ("1.5-i2v", [Size(64, 48, 13)]),
        ("cogview3", [Size(64, 64), Size(128, 64)]),
        ("cogview4", [Size(64, 64)]),
        ("svd", [Size(64, 64, 2)]),
        ("wan", [Size(64, 48, 9)]),
    ],
)
def test_a_run_at_a_warm_size_compiles_nothing(model_folder: Any, model: str, sizes: list[Size]) -> None:
    handle = opened(model_folder(model))
    said: list[tuple[int, int, str]] = []
    told: list[str] = []
    with torch.inference_mode():
        warmed = warm_up(handle, sizes, step_done=lambda *step: said.append(step), tell=told.append)
    assert [each.size for each in warmed] == sizes and all(each.report.graphs for each in warmed)
    assert [done for done, *_ in said] == list(range(1, STEPS * len(sizes) + 1))
    assert {total for _, total, _ in said} == {STEPS * len(sizes)}
    compiling = [line for line in told if "encod" not in line]
    assert compiling[0].startswith(f"{sizes[0]}: inductor: compiling block 1 of "), told
    assert [graphs_of_a_run(handle, size) for size in sizes] == [0] * len(sizes)


def test_without_guidance_is_another_size(model_folder: Any) -> None:
    handle = opened(model_folder("2b"))
    with torch.inference_mode():
        warm_up(handle, [Size(64, 48, 9)], guidance=False)
    assert graphs_of_a_run(handle, Size(64, 48, 9), guided=False) == 0
    assert graphs_of_a_run(handle, Size(64, 48, 9)) == 1


def test_where_the_stream_is_wide_the_wide_denoiser_is_what_is_warm(model_folder: Any) -> None:
    handle = opened(model_folder("5b", "stream"), "fp16")
    with torch.inference_mode():
        (warmed,) = warm_up(handle, [Size(64, 48, 9)])
    assert [step.dtype for step in warmed.report.steps] == ["fp16"] * STEPS and warmed.report.graphs == 1
    assert "stream in float32" in str(warmed) and "1 graph compiled anew" in str(warmed)
    warmed.report.graphs_kept = 1
    assert "1 graph, from the cache of earlier runs" in str(warmed)
    assert graphs_of_a_run(handle, Size(64, 48, 9)) == 0


def test_the_prompt_that_is_wired_is_used(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = opened(model_folder("2b"), backend="eager")
    (positive, negative), _ = encode_prompts(handle, ["a red kite", "grey"])
    monkeypatch.setattr("comfyui_onediff_guard.pipelines.compile.warm_up.encode_prompts", None)
    (warmed,) = warm_up(handle, [Size(64, 48, 9)], embeddings=(positive, negative))
    assert warmed.report.graphs is None and "compiled anew" not in str(warmed)


def test_sizes_are_read_in_every_way_of_writing_them(model_folder: Any) -> None:
    handle = opened(model_folder("2b"), backend="eager")
    config = handle.store.model.denoiser_config
    usual = Size(config["sample_width"] * 8, config["sample_height"] * 8, config["sample_frames"])
    assert sizes_of(handle, " \n\n") == [usual]
    assert sizes_of(handle, "64×48×9\n 64 x 48 x 9 \n96X64*13\n\n") == [Size(64, 48, 9), Size(96, 64, 13)]
    assert sizes_of(handle, "96×64") == [Size(96, 64, usual.frames)]
    assert sizes_of(opened(model_folder("cogview3"), backend="eager"), "64x128") == [Size(64, 128)]


@pytest.mark.parametrize(
    ("model", "text", "error", "said"),
    [
        ("2b", "64×48×9\nbig", BadInput, "has the line 'big'. Write one size a line"),
        ("2b", "64", BadInput, "has the line '64'"),
        ("2b", "60×48×9", BadSize, "has the line '60×48×9': width is 60, but must be a multiple of 16"),
        ("2b", "64×48×8", BadSize, "frames is 8"),
        ("1.5-i2v", "4096×48×9", BadSize, "makes up to"),
        ("cogview3", "64×64×9", BadInput, "CogView3-Plus makes images: leave the frames out"),
    ],
)
def test_a_bad_line_is_refused_before_anything_is_loaded(
    model_folder: Any, model: str, text: str, error: type[Exception], said: str
) -> None:
    handle = opened(model_folder(model), backend="eager")
    with pytest.raises(error, match=said):
        sizes_of(handle, text)
    assert not handle.store.loaded()


def test_the_node_hands_the_same_pipeline_on(model_folder: Any, tmp_path: Any) -> None:
    model = model_folder("2b")
    with host.plain_folders(models=[model.parent], input=tmp_path, output=tmp_path), torch.inference_mode():
        pipeline = NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]().load(model.name, "fp32", "inductor", "none")[0]
        encoded = NODE_CLASS_MAPPINGS["OneDiffGuardEncodePrompt"]().encode(pipeline, "a kite", "", "inherit")["result"]
        node = NODE_CLASS_MAPPINGS["OneDiffGuardWarmUp"]()
        made = node.warm_up(pipeline, "64×48×9", True, "inherit", positive=encoded[0], negative=encoded[1])
        with pytest.raises(BadInput, match="one of 'positive' and 'negative'"):
            node.warm_up(pipeline, "64×48×9", True, "inherit", positive=encoded[0])
    assert made["result"][0] is pipeline
    assert made["result"][1] == made["ui"]["text"][0] and "1 graph compiled anew" in made["result"][1]
    assert [report["graphs"] for report in made["ui"]["onediff_guard"]] == [1]


def test_an_interrupt_while_warming_up_ends_it_and_the_next_works(model_folder: Any, tmp_path: Any) -> None:
    model = model_folder("2b")
    with host.plain_folders(models=[model.parent], input=tmp_path, output=tmp_path), torch.inference_mode():
        pipeline = NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]().load(model.name, "fp32", "inductor", "none")[0]
        node = NODE_CLASS_MAPPINGS["OneDiffGuardWarmUp"]()
        encode_prompts(pipeline, [""])  # what else an interrupt would end
        pipeline.store.module("transformer", pipeline.plan(Component.DENOISER).dtype)
        host.interrupt()
        with pytest.raises(host.Interrupted, match="compiling block 1 of"):
            node.warm_up(pipeline, "96×80×9", True, "inherit")
    with host.plain_folders(models=[model.parent], input=tmp_path, output=tmp_path), torch.inference_mode():
        assert "96×80×9: " in node.warm_up(pipeline, "96×80×9", True, "inherit")["result"][1]
