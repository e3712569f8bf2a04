"""What is said of runs on cards of so many bytes: it fits them, and it is what runs do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.errors import BadSize
from comfyui_onediff_guard.pipelines.insight import paper
from comfyui_onediff_guard.pipelines.insight.paper_result import OTHERS
from comfyui_onediff_guard.pipelines.insight.published import PUBLISHED
from comfyui_onediff_guard.pipelines.models.recognised import family_of, open_model
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.weights.ladder import Way
from comfyui_onediff_guard.precision.arch import named
from limited import limited_card
from small_runs import SIZES, sampled
from test_ladder import everything_away, most_of, opened

GIB = 2**30
FAMILIES = ("CogVideoX-5B", "CogView3-Plus-3B", "CogView4-6B", "SVD-XT", "Wan2.1-T2V-14B")


@pytest.mark.parametrize("name", FAMILIES)
def test_published_models_run_on_cards_from_8_gib_on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(paper, "PUBLISHED", {name: PUBLISHED[name]})
    sizes = [8 * GIB, 12 * GIB, 16 * GIB, 24 * GIB]
    runs = [*paper.runs_on_paper(None, named("sm86"), sizes)]
    assert [run.memory for run in runs] == sizes
    for run in runs:
        for stage in run.stages:
            assert stage.fits
            assert stage.weights + stage.beside <= run.has == run.memory - OTHERS
            assert stage.fastest >= stage.weights + stage.beside
    peaks = [max(stage.weights + stage.beside for stage in run.stages) for run in runs]
    assert peaks == sorted(peaks), "a larger card is made use of"


def chosen(report: Any) -> str:
    return next(note.partition("chose ")[2] for note in report.notes if "offload auto chose" in note)


@pytest.mark.parametrize("model", ["2b", "cogview3", "svd", "wan"])
@pytest.mark.parametrize("part", [2.0, 0.7, 0.4])
def test_a_run_does_what_was_said(model_folder: Callable[..., Path], model: str, part: float) -> None:
    """Its report and the page say the same of each stage, with the same figures, if it takes no picture."""
    folder = model_folder(model)
    with limited_card() as card:
        handle = opened(card, folder, "auto", precision="bf16")
        latents, _ = sampled(handle, model)
        _, most = most_of(card, handle, lambda: decode(handle, latents))
        room = int(part * most)
        width, height, frames = SIZES[model]
        (said,) = paper.runs_on_paper(
            open_model(folder, family_of(folder)),
            handle.architecture,
            [room + OTHERS],
            (width, height, frames),
            handle.precision,
        )
        stages = {stage.stage: stage for stage in said.stages if stage.fits}
        reports = {}
        with card.limited(room):
            if "decode" in stages:
                reports["decode"] = decode(handle, latents)[1]
                everything_away(handle)
            if "text encoder" in stages:
                handle.store.prompts.clear()
                reports["text encoder"] = encode_prompts(handle, ["a red kite"])[1]
                everything_away(handle)
        if "denoiser" in stages and not handle.family.takes_image:
            with card.limited(room):
                reports["denoiser"] = sampled(handle, model)[1]
    for name, report in reports.items():
        way, _, figures = chosen(report).partition(": ")
        assert way == stages[name].way, name
        stage = stages[name]
        assert figures.startswith(Way(way, stage.weights, stage.beside).in_words()), name


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [("2b", (721, 480, 49), "Nearest: 720"), ("cogview3", (512, 512, 9), "makes images, not 9 frames")],
)
def test_a_size_that_no_model_makes_is_refused(
    model_folder: Callable[..., Path], model: str, size: tuple[int, int, int], said: str
) -> None:
    folder = model_folder(model)
    with pytest.raises(BadSize, match=said):
        next(paper.runs_on_paper(open_model(folder, family_of(folder)), named("sm86"), [GIB], size))
