"""The VRAM estimate for published models on cards of several sizes, and for unsupported image sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_onediff_guard.pipelines.errors import BadSize
from comfyui_onediff_guard.pipelines.insight import vram_estimate
from comfyui_onediff_guard.pipelines.insight.vram_estimate import PUBLISHED
from comfyui_onediff_guard.pipelines.models.folder import family_of, open_model
from comfyui_onediff_guard.precision.arch import named

GIB = 2**30
FAMILIES = ("CogVideoX-5B", "CogView3-Plus-3B", "CogView4-6B", "SVD-XT", "Wan2.1-T2V-14B")


@pytest.mark.parametrize("name", FAMILIES)
def test_published_models_fit_on_cards_from_8_gib(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(vram_estimate, "PUBLISHED", {name: PUBLISHED[name]})
    sizes = [8 * GIB, 12 * GIB, 16 * GIB, 24 * GIB]
    runs = [*vram_estimate.estimate_runs(None, named("sm86"), sizes)]
    assert [run.memory for run in runs] == sizes
    for run in runs:
        for stage in run.stages:
            assert stage.fits
            assert stage.weights + stage.beside <= run.has == run.memory - vram_estimate.RESERVED
    peaks = [max(stage.weights + stage.beside for stage in run.stages) for run in runs]
    assert peaks == sorted(peaks), "a larger card is used"


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("2b", (721, 480, 49), "Nearest: 720"),
        ("2b", (720, 480, 50), "frames is 50"),
        ("cogview3", (512, 512, 9), "makes images, not 9 frames"),
    ],
)
def test_unsupported_size_is_rejected(
    model_folder: Callable[..., Path], model: str, size: tuple[int, int, int], message: str
) -> None:
    folder = model_folder(model)
    with pytest.raises(BadSize, match=message):
        next(vram_estimate.estimate_runs(open_model(folder, family_of(folder)), named("sm86"), [GIB], size))
