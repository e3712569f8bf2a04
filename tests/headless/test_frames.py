"""PSNR, largest error and broken frames, compared with formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from comfyui_onediff_guard.headless.comparison import frames as measured
from comfyui_onediff_guard.headless.errors import RunFailedError
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

SHAPE = (3, 4, 5, 3)


def flat(*values: float) -> np.ndarray:
    """Frames of one value each."""
    return np.stack([np.full(SHAPE[1:], value, np.float32) for value in values])


@given(st.integers(1, 255))
def test_psnr_of_constant_error_matches_formula(steps: int) -> None:
    error = steps / 256  # exact in float32
    found = measured.compare(flat(error, error, error), flat(0, 0, 0))
    assert found.max_error == error
    assert found.psnr == pytest.approx(-20 * math.log10(error))
    assert found.frame_psnr == pytest.approx((found.psnr,) * 3)


@given(st.integers(1, 60))
def test_psnr_weights_wrong_values_by_their_share(wrong: int) -> None:
    reference = flat(0.5)
    frames = reference.copy()
    frames.reshape(-1)[:wrong] = 0.75
    found = measured.compare(frames, reference)
    assert found.psnr == pytest.approx(-10 * math.log10(0.25**2 * wrong / 60))
    assert found.max_error == 0.25


@given(st.permutations([0.0, 0.25, 0.5]))
def test_total_psnr_averages_squared_errors_not_decibels(errors: list[float]) -> None:
    found = measured.compare(flat(*(0.25 + error for error in errors)), flat(0.25, 0.25, 0.25))
    assert found.psnr == pytest.approx(-10 * math.log10((0.25**2 + 0.5**2) / 3))
    assert found.max_error == 0.5
    assert sum(psnr == math.inf for psnr in found.frame_psnr) == 1


BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("frames", "reference", "frame_psnr", "total", "counts"),
    [
        ((0.2, 0.4), (0.2, 0.4), (math.inf,) * 2, (math.inf, 0.0), (2, 0, 0)),
        ((0.0, 0.4), (0.0, 0.4), (math.inf,) * 2, (math.inf, 0.0), (2, 0, 0)),
        ((0.0, 0.4), (0.2, 0.4), (None, math.inf), (None, None), (2, 1, 1)),
        ((0.2,), (math.nan,), (None,), (None, None), (1, 0, 1)),
        *(((0.2, bad, 0.6), (0.2, 0.4, 0.5), (math.inf, None, 20), (None, None), (2, 0, 1)) for bad in BAD),
    ],
)
def test_nonfinite_or_wrongly_black_frame_has_no_psnr(
    frames: tuple[float, ...], reference: tuple[float, ...], frame_psnr: Any, total: Any, counts: tuple[int, ...]
) -> None:
    made = flat(*(0.1 if abs(value) == math.inf or value != value else value for value in frames))
    for frame, value in zip(made, frames, strict=True):
        frame[0, 0, 0] = value
    found = measured.compare(made, flat(*reference))
    assert found.frame_psnr == pytest.approx(frame_psnr, abs=1e-4)
    assert ((found.psnr, found.max_error), (found.finite, found.black, found.frame_psnr.count(None))) == (total, counts)


def test_frames_of_another_shape_are_rejected() -> None:
    with pytest.raises(RunFailedError, match=r"shape \(2, 4, 5, 3\), the reference's \(3, 4, 5, 3\)"):
        measured.compare(flat(0, 0), flat(0, 0, 0))


def test_difference_is_largest_channel_error_of_pixel() -> None:
    frame, reference = flat(0.5)[0], flat(0.5)[0]
    frame[0, 0] = (0.5, 0.25, 0.625)
    frame[1, 1, 2] = math.nan
    reference[2, 2, 0] = frame[2, 2, 0] = math.inf
    errors = measured.difference(frame, reference)
    assert errors[0, 0] == 0.25
    assert np.argwhere(np.isnan(errors)).tolist() == [[1, 1], [2, 2]]
    assert np.nansum(errors) == 0.25


def test_nonfinite_values_become_black_or_white_bytes() -> None:
    shown = measured.as_bytes(np.array([math.nan, math.inf, -math.inf, 0.5, 2.0, -1.0, 1.0], np.float32))
    assert shown.tolist() == [0, 255, 0, 127, 255, 0, 255]


def test_png_files_are_read_back_exactly_or_rejected(tmp_path) -> None:
    values = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    Image.fromarray(values).save(tmp_path / "a.png")
    Image.fromarray(255 - values).save(tmp_path / "b.png")
    read = measured.read_pngs([tmp_path / "a.png", tmp_path / "b.png"])
    assert read.dtype == np.float32 and (measured.as_bytes(read) == np.stack([values, 255 - values])).all()
    Image.new("RGB", (3, 3)).save(tmp_path / "c.png")
    (tmp_path / "d.png").write_bytes(b"no picture")
    for names, message in (("ac", "one size"), ("d", "cannot be read"), ("", r"found 0 of these sizes: \[\]")):
        with pytest.raises(RunFailedError, match=message):
            measured.read_pngs([tmp_path / f"{name}.png" for name in names])
