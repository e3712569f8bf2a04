"""The VRAM estimate for published models on cards of several sizes."""

from __future__ import annotations

import pytest
from comfyui_onediff_guard.pipelines.insight import vram_estimate
from comfyui_onediff_guard.pipelines.insight.vram_estimate import PUBLISHED
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
