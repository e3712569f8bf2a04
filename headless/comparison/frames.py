"""Comparison of two runs' frames: broken frames, PSNR, largest error, and its place.

Frames are float32 [frames, height, width, 3], black 0 to white 1. A frame is broken if it contains NaN or infinity, or
if it is all black and the reference's is not: a saved file has black in place of NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ...trust.message import shown
from ..errors import RunFailedError


@dataclass(frozen=True)
class Likeness:
    """How close a run's frames are to the reference's."""

    finite: int  # frames without NaN and infinity
    black: int  # frames that are all black, where the reference's are not
    frame_psnr: tuple[float | None, ...]  # dB; infinite if a frame is equal, None if it is broken
    psnr: float | None  # dB over all frames; None if one of them is broken
    max_error: float | None  # max |difference|; None if a frame is broken


def compare(frames: np.ndarray, reference: np.ndarray) -> Likeness:
    """Compare frames with the reference's. Raises RunFailedError if their shapes differ."""
    if frames.shape != reference.shape:
        raise RunFailedError(f"Its frames have the shape {frames.shape}, the reference's {reference.shape}.")
    finite = black = 0
    squares: list[float] = []  # mean square and largest error of each frame; NaN if it is broken
    errors: list[float] = []
    for frame, expected in zip(frames, reference, strict=True):  # one by one: a video in float64 may not fit
        apart = _apart(frame, expected)
        is_black = not frame.any() and bool(expected.any())
        finite, black = finite + bool(np.isfinite(frame).all()), black + is_black
        squares.append(math.nan if is_black else float(np.square(apart).mean()))
        errors.append(math.nan if is_black else float(apart.max()))
    most = float(np.max(errors))
    psnr = _psnr(float(np.mean(squares)))
    return Likeness(finite, black, tuple(map(_psnr, squares)), psnr, None if math.isnan(most) else most)


def difference(frame: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return max |difference| over a pixel's channels, [height, width]; NaN where either is not finite."""
    return _apart(frame, reference).max(axis=-1)


def _apart(frame: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return |difference|; NaN where either is not finite."""
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        apart = np.abs(frame.astype(np.float64) - reference)
    return np.where(np.isfinite(apart), apart, np.nan)


def as_bytes(frames: np.ndarray) -> np.ndarray:
    """Convert frames to uint8, as they are shown and saved: NaN is black, infinity white or black by its sign."""
    shown = np.nan_to_num(frames, nan=0.0, posinf=1.0, neginf=0.0)
    return (shown * 255).clip(0, 255).astype(np.uint8)


def read_pngs(files: Sequence[Path]) -> np.ndarray:
    """Read PNG files as frames. Raises RunFailedError if one cannot be read, or their sizes differ."""
    frames = []
    try:
        for file in files:
            with Image.open(file, formats=("PNG",)) as picture:
                frames.append(np.asarray(picture.convert("RGB"), dtype=np.float32) / 255)
    except Exception as error:  # Pillow raises almost any type for damaged files
        raise RunFailedError(f"An output image of the run cannot be read: {shown(error, 200)}.") from error
    if len({frame.shape for frame in frames}) != 1:
        found = [*map(np.shape, frames)]
        raise RunFailedError(f"Expected images of one size, found {len(frames)} of these sizes: {found}.")
    return np.stack(frames)


def _psnr(mean_square: float) -> float | None:
    """Return the peak signal-to-noise ratio in dB, for a peak of 1; None for NaN."""
    if math.isnan(mean_square):
        return None
    return -10 * math.log10(mean_square) if mean_square else math.inf
