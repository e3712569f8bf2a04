"""The picture of a comparison: one scale for all, NaN in a colour of its own, failures in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from comfyui_onediff_guard.headless.comparison import pictures
from PIL import Image

FRAMES = np.full((3, 100, 160, 3), 200, np.uint8)
RUN = pictures.PicturedRun(
    "bf16", "finite", pictures.GOOD, "bf16\nPSNR 30.0 dB, max error 0.1\n1.00 s, 0 reruns", FRAMES
)
WORDS = ("workflow.json", "One seed", "Errors from float frames.")


def grid(*differences: np.ndarray | None, runs: list[pictures.PicturedRun] | None = None) -> Image.Image:
    runs = [
        replace(run, difference=each) for run, each in zip(runs or [RUN] * len(differences), differences, strict=True)
    ]
    return pictures.grid(runs, WORDS, frame=1)


def flat(value: float) -> np.ndarray:
    return np.full((100, 160), value)


def shares(picture: Image.Image, colour: object) -> float:
    """How many of the picture's pixels have this colour."""
    return float((np.asarray(picture) == np.array(colour, np.uint8)).all(-1).mean())


def test_the_scale_is_the_same_whatever_else_is_shown() -> None:
    low, high = (tuple(pictures._coloured(flat(value))[0, 0]) for value in (1e-3, 1e-1))
    for other in (1e-4, 1.0):
        picture = grid(None, flat(1e-3), flat(other))
        assert shares(picture, low) > 0.08
    assert shares(grid(None, flat(1e-1)), high) > 0.1
    assert shares(grid(None, flat(1e-1)), low) < 0.01


def test_colours_grow_brighter_with_the_error_and_end_at_the_scales_ends() -> None:
    values = (*pictures.SCALE,)
    brightness = [int(pictures._coloured(flat(value))[0, 0].sum()) for value in values]
    assert brightness == sorted(set(brightness))
    assert (pictures._coloured(flat(0)) == pictures._coloured(flat(values[0]))).all()
    assert (pictures._coloured(flat(9)) == pictures._coloured(flat(values[-1]))).all()


def test_nan_is_grey_pixel_by_pixel() -> None:
    half = flat(1.0)
    half[:50] = np.nan
    grey, none = (shares(grid(None, difference), pictures.NEUTRAL) for difference in (half, flat(1.0)))
    assert 0.05 < grey - none < 0.2
    assert (pictures._coloured(half)[:50] == pictures.NEUTRAL).all()


@pytest.mark.parametrize("runs", [2, 5, 8])
@pytest.mark.parametrize("shape", [(100, 160), (160, 100), (20, 300)])
def test_it_is_never_wider_than_a_page(runs: int, shape: tuple[int, int]) -> None:
    run = replace(RUN, frames=np.zeros((3, *shape, 3), np.uint8))
    picture = grid(None, *[np.zeros(shape)] * (runs - 1), runs=[run] * runs)
    assert picture.width <= pictures.GRID_WIDTH
    assert picture.height < 1600


def test_a_run_that_failed_says_why_in_its_own_column() -> None:
    error = "node 4 (Sample CogVideoX) failed: OutOfMemoryError: " + "a_very_long_word_without_a_space" * 9
    failed = pictures.PicturedRun("fp16", "failed", pictures.BAD, error, pictures.NO_FRAMES)
    picture = grid(None, None, flat(0.1), runs=[RUN, failed, RUN])
    clean = np.asarray(grid(None, flat(0.1), flat(0.1)))
    column = pictures.MARGIN + 2 * (pictures.CELL_WIDTH + pictures.GAP) - pictures.GAP
    assert picture.size == (clean.shape[1], clean.shape[0])
    assert (np.asarray(picture)[:, column:] == clean[:, column:]).all(), "nothing reaches into the next column"
    assert shares(picture, pictures.BAD) > 0.001


def test_captions_are_cut_where_the_column_ends() -> None:
    other = replace(RUN, numbers="x")
    long = replace(RUN, numbers="\n".join(["fp16, overflow protection, " * 9] * 3))
    plain, cut = (np.asarray(grid(None, flat(0.1), runs=[run, other])) for run in (RUN, long))
    column = pictures.MARGIN + pictures.CELL_WIDTH
    captions = slice(-120, -50)
    assert (cut[captions, column:] == plain[captions, column:]).all()
