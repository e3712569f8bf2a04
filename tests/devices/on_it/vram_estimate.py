"""Runs on cards of several sizes match the VRAM estimate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from card_room import Room, offload_all, result_and_peak
from comfyui_onediff_guard.pipelines.insight import vram_estimate
from comfyui_onediff_guard.pipelines.models.folder import family_of, open_model
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.weights.placement import ExecutionOption
from small_runs import SIZES, sampled


def auto_note(report: Any) -> str:
    return next(note.partition("chose ")[2] for note in report.notes if "offload auto chose" in note)


@pytest.mark.parametrize("model", ["2b", "cogview3", pytest.param("svd", marks=pytest.mark.long), "wan"])
@pytest.mark.parametrize("part", [2.0, 0.7, 0.4])
def test_run_matches_the_vram_estimate(room: Room, model_folder: Callable[..., Path], model: str, part: float) -> None:
    """Report and estimate have the same mode and figures for each stage, if the model needs no image."""
    folder = model_folder(model)
    handle = room.opened(model, "auto", precision="bf16")
    latents, _ = sampled(handle, model)
    _, most = result_and_peak(room, handle, lambda: decode(handle, latents))
    has = int(part * most)
    width, height, frames = SIZES[model]
    stored = open_model(folder, family_of(folder))
    size = (width, height, frames)
    (estimate,) = vram_estimate.estimate_runs(
        stored, handle.architecture, [has + vram_estimate.RESERVED], size, handle.precision
    )
    stages = {stage.stage: stage for stage in estimate.stages if stage.fits}
    reports = {}
    with room.limited(has):
        if "decode" in stages:
            reports["decode"] = decode(handle, latents)[1]
            offload_all(handle)
        if "text encoder" in stages:
            handle.store.prompts.clear()
            reports["text encoder"] = encode_prompts(handle, ["a red kite"])[1]
            offload_all(handle)
    if "denoiser" in stages and not handle.family.takes_image:
        with room.limited(has):
            reports["denoiser"] = sampled(handle, model)[1]
    for name, report in reports.items():
        way, _, figures = auto_note(report).partition(": ")
        assert way == stages[name].way, name
        stage = stages[name]
        assert figures.startswith(ExecutionOption(way, stage.weights, stage.beside).in_words()), name
