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
        deep = _deep(upright)
        if deep is None:
            rgba = np.array(upright.convert("RGBA"), dtype=np.float32) / 255
        else:
            opaque = np.array(upright) != upright.info.get("transparency")
            rgba = np.stack([deep, deep, deep, opaque.astype(np.float32)], axis=-1)
        yield Frame(rgba, upright.has_transparency_data)


def _deep(image: Image) -> np.ndarray | None:
    """Grey of more than 8 bits as float32, 0 to 1, which Pillow would cut off at 255; None for all other pictures.

    16 bits are read as by ComfyUI 0.33. Floats up to 1 are taken as they are; ComfyUI makes black of them.
    """
    import numpy as np

    whole = image.mode == "I" or image.mode.startswith("I;16")
    if not whole and image.mode != "F":
        return None
    grey = np.nan_to_num(np.array(image, dtype=np.float32), posinf=np.inf)
    top = 65535 if whole else 1 if grey.max() <= 1 else 255
    return np.clip(grey / top, 0, 1)
