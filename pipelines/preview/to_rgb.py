"""Latents → colours by one matrix, which is fitted to a VAE once: what it encodes of a picture whose colours are known.

The matrix is kept as JSON, so that later processes need no VAE before they decode.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from ...trust import foreign
from ...trust.foreign import Foreign, Unreadable
from ..atomic_files import replacing

logger = logging.getLogger(__name__)

SIDE = 32  # latents of a side of the picture that is encoded
_SEED = 0
_KIND = "onediff-guard preview"
_MAX_BYTES = 2**20

Row = Annotated[list[float], Field(min_length=3, max_length=3)]


class _File(Foreign):
    kind: Literal["onediff-guard preview"]
    matrix: Annotated[list[Row], Field(min_length=2, max_length=1025)]


def picture_to_encode(pixels: int) -> torch.Tensor:
    """Return [1, 3, height, width] in -1..1, with colours in patches of many sizes.

    pixels: of a latent's side.
    """
    draw, side = torch.Generator().manual_seed(_SEED), SIDE * pixels
    picture = torch.zeros(1, 3, side, side)
    for patches in (2, 4, 8, 16, SIDE):
        colours = torch.randn(1, 3, patches, patches, generator=draw)
        picture += torch.nn.functional.interpolate(colours, size=(side, side), mode="bilinear")
    return (picture / 2).clamp(-1, 1)


def fitted(picture: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Return the [channels + 1, 3] by which latents, with a 1 after their channels, come nearest to the colours.

    picture: [1, 3, height, width]. latents: [channels, rows, columns] that it was encoded to.
    Raises ValueError where they are not finite.
    """
    colours = torch.nn.functional.adaptive_avg_pool2d(picture, (latents.shape[1], latents.shape[2]))[0]
    given, wanted = (each.flatten(1).T.cpu().double() for each in (latents, colours))
    with_one = torch.cat([given, torch.ones(len(given), 1, dtype=torch.float64)], dim=1)
    if not with_one.isfinite().all():
        raise ValueError("the VAE encodes a picture to what is not finite")
    return torch.linalg.lstsq(with_one, wanted, driver="gelsd").solution.float()


def colours_of(latents: torch.Tensor, matrix: torch.Tensor) -> Any:
    """Return latents [channels, rows, columns] as a PIL image of as many pixels."""
    from PIL import Image

    mixed = latents.float().cpu().movedim(0, -1) @ matrix[:-1] + matrix[-1]
    levels = ((mixed + 1) * 127.5).nan_to_num(0).clamp(0, 255).round()
    return Image.fromarray(levels.to(torch.uint8).numpy())


def kept(file: Path | None, channels: int, fit: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the matrix that a file holds, or make it and keep it there. file: None to keep nothing."""
    if file and file.is_file():
        try:
            matrix = torch.tensor(foreign.fitting(_File, foreign.read(file, limit=_MAX_BYTES)).matrix)
            if len(matrix) == channels + 1:
                return matrix
        except (OSError, Unreadable) as error:
            logger.warning("%s is made anew: %s", file, error)
    matrix = fit()
    if file:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as stream:
                stream.write(json.dumps({"kind": _KIND, "matrix": matrix.tolist()}).encode())
        except OSError as error:
            logger.warning("what previews need could not be kept: %s", error)
    return matrix
