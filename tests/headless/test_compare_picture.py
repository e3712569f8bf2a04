"""The picture of a comparison: one colour scale for all runs, NaN in grey, failures in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
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


def share_of(picture: Image.Image, colour: object) -> float:
    """The share of the picture's pixels that have this colour."""
    return float((np.asarray(picture) == np.array(colour, np.uint8)).all(-1).mean())


def test_error_colour_does_not_depend_on_other_runs() -> None:
    low, high = (tuple(pictures._coloured(flat(value))[0, 0]) for value in (1e-3, 1e-1))
    for other in (1e-4, 1.0):
        picture = grid(None, flat(1e-3), flat(other))
        assert share_of(picture, low) > 0.08
    assert share_of(grid(None, flat(1e-1)), high) > 0.1
    assert share_of(grid(None, flat(1e-1)), low) < 0.01


def test_nan_pixels_are_grey() -> None:
    half = flat(1.0)
    half[:50] = np.nan
    grey, none = (share_of(grid(None, difference), pictures.NEUTRAL) for difference in (half, flat(1.0)))
    assert 0.05 < grey - none < 0.2
    assert (pictures._coloured(half)[:50] == pictures.NEUTRAL).all()


def test_failed_run_shows_error_within_its_column() -> None:
    error = "node 4 (Sample CogVideoX) failed: OutOfMemoryError: " + "a_very_long_word_without_a_space" * 9
    failed = pictures.PicturedRun("fp16", "failed", pictures.BAD, error, pictures.NO_FRAMES)
    picture = grid(None, None, flat(0.1), runs=[RUN, failed, RUN])
    clean = np.asarray(grid(None, flat(0.1), flat(0.1)))
    column = pictures.MARGIN + 2 * (pictures.CELL_WIDTH + pictures.GAP) - pictures.GAP
    assert picture.size == (clean.shape[1], clean.shape[0])
    assert (np.asarray(picture)[:, column:] == clean[:, column:]).all(), "nothing reaches into the next column"
    assert share_of(picture, pictures.BAD) > 0.001
