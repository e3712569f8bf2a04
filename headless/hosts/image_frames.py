"""The frames of an image that other people's programs wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from ...trust.text import shown
from .input_images import decoders

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

MAX_PIXELS = 2**27  # of all frames together: 2 GB as float32


@dataclass(frozen=True)
class Frame:
    rgba: np.ndarray  # float32 [height, width, 4], 0 to 1, turned as its EXIF says
    has_transparency: bool


def frames(data: bytes) -> list[Frame]:
    """All frames of an image file. Raises ValueError: damaged, or more pixels than memory should take."""
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=decoders()) as file:
            return list(_frames(file))
    except Exception as error:  # of damaged files Pillow raises almost anything
        raise ValueError(
            f"the image cannot be read ({type(error).__name__}: {shown(error, 200)}). Save it anew as PNG or JPEG."
        ) from error


def _frames(file: Image) -> Iterator[Frame]:
    import numpy as np
    from PIL import ImageOps, ImageSequence

    pixels = 0
    for frame in ImageSequence.Iterator(file):
        pixels += frame.width * frame.height
        if not 0 < pixels <= MAX_PIXELS:
            raise ValueError(f"{pixels:,} pixels in all frames together, expected at most {MAX_PIXELS:,}")
        upright = ImageOps.exif_transpose(frame)
        if upright.mode == "I":
            upright = upright.point(lambda value: value * (1 / 255))
        rgba = np.array(upright.convert("RGBA"), dtype=np.float32) / 255
        yield Frame(rgba, upright.has_transparency_data)
