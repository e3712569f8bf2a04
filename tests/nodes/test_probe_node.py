"""The Numerics Probe node: its outputs, saved profiles, progress and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from as_comfyui import GRAPHS, Refused, call, picture
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.errors import BadSize
from comfyui_onediff_guard.pipelines.run.handle import profile_of
from comfyui_onediff_guard.precision.overrides import ALL_LAYERS_SCALED, parse
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.trust.message import BadInput

SMALL = {"steps": 1, "width": 64, "height": 48, "frames": 9}
SVD_SMALL = {"steps": 1, "width": 64, "height": 64, "frames": 2}
SAVED = {"architecture": "sm75", "save": True}


@pytest.fixture
def folder(model_folder: Callable[..., Path], without_comfyui: None) -> Path:
    return model_folder("5b", "stream")


def probed(pipeline: Any, **inputs: Any) -> dict[str, Any]:
    positive, negative = GRAPHS["5b"].encode(pipeline)["result"]
    return call("NumericsProbe", **{"pipeline": pipeline, "positive": positive, "negative": negative} | SMALL | inputs)


def test_probe_outputs_picture_recommendation_and_profile(folder: Path) -> None:
    answer = probed(GRAPHS["5b"].load(folder), architecture="sm75", seed=3)
    images, text, profile = answer["result"]
    assert images.ndim == 4 and images.shape[0] == 1 and images.shape[3] == 3
    assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
    assert text.startswith(f"Recommended on sm75 (Turing): fp16 with {ALL_LAYERS_SCALED}\n")
    assert answer["ui"]["text"] == [text] and "To apply it" not in text
    assert parse(profile, "it").architecture == "sm75"
    (report,) = answer["ui"]["onediff_guard"]
    assert report["profile"] == profile and report["measured_steps"] == 1 and len(report["worst"]) == 10
    json.dumps(report, allow_nan=False)
    assert list(host.profiles_directory().glob("*.json")) == [], "saved only on request"


def test_other_card_changes_recommendation_but_not_pipeline(folder: Path) -> None:
    pipeline = GRAPHS["5b"].load(folder)
    (report,) = probed(pipeline, architecture="sm80")["ui"]["onediff_guard"]
    assert (report["plan"], report["architecture"]) == ("bf16", "sm80") and pipeline.architecture.name == "cpu"
    own_profile = profile_of(pipeline, pipeline.family.denoiser, "fp16")
    assert own_profile.architecture == "cpu", "nor the card of the pipeline's own profile"


@pytest.mark.parametrize("model", ["5b", "svd"])
def test_save_stores_profile_only_if_it_has_overrides(
    model_folder: Callable[..., Path], without_comfyui: None, model: str
) -> None:
    """A denoiser that is protected from the start needs no profile."""
    pipeline = GRAPHS[model].load(model_folder(model, "inside"))
    if model == "svd":
        answer = call("NumericsProbe", pipeline=pipeline, image=picture(frames=1), **SVD_SMALL, **SAVED)
    else:
        answer = probed(pipeline, **SAVED)
    kept = {file.read_text(): file.stem for file in host.profiles_directory().glob("*.json")}
    assert [*kept] == [answer["result"][2]] * (model == "svd")
    assert (f"kept as {''.join(kept.values())}" if kept else "nothing to keep") in answer["result"][1]
    assert parse(answer["result"][2], "it").learned.all_layers_scaled is bool(kept)


def test_size_0_means_size_of_model_and_invalid_size_is_refused(folder: Path) -> None:
    with pytest.raises(BadSize, match="width is 65"):
        probed(GRAPHS["5b"].load(folder), width=65)
    assert probed(GRAPHS["5b"].load(folder), width=0, height=0, frames=0)["result"][1]


def test_missing_input_is_named_in_error(folder: Path, model_folder: Callable[..., Path]) -> None:
    pipeline = GRAPHS["5b"].load(folder)
    with pytest.raises(BadInput, match="wire positive and negative from Encode Prompt"):
        call("NumericsProbe", pipeline=pipeline, **SMALL)
    with pytest.raises(BadInput, match="needs a start image"):
        call("NumericsProbe", pipeline=GRAPHS["svd"].load(model_folder("svd")), steps=1)
    with pytest.raises(Refused, match="Value not in list: 'sm7'"):
        probed(pipeline, architecture="sm7")


def test_model_without_prompt_is_probed_from_image(folder: Path, model_folder: Callable[..., Path]) -> None:
    pipeline = GRAPHS["svd"].load(model_folder("svd"))
    inputs = {"pipeline": pipeline, "architecture": "sm80", **SVD_SMALL}
    for number in (1, 2):
        answer = call("NumericsProbe", image=picture(frames=number), **inputs)
        text = answer["result"][1]
        assert text.startswith("Recommended on sm80 (Ampere): fp16 plain") and answer["ui"]["text"] == [text]
        assert ("The batch has 2 images; only the first is used." in text) is (number == 2)


def test_probe_shows_progress_and_can_be_interrupted(comfyui: Any, model_folder: Callable[..., Path]) -> None:
    pipeline = GRAPHS["2b"].load(model_folder("2b"))
    probed(pipeline, steps=2)
    assert comfyui.bars[-1] == [(0, 2), (1, 2), (2, 2)], "the first is sent while the denoiser is read"
    comfyui.management.interrupted = True
    with pytest.raises(KeyError, match="InterruptProcessingException"):
        probed(pipeline, steps=2)
    assert comfyui.bars[-1] == [(1, 2)]
    denoiser = pipeline.store.module("transformer", pipeline.plan(Component.DENOISER).dtype)
    assert not any(module._forward_hooks for module in denoiser.modules())
