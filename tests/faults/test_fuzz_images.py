"""Damaged images of the input folder: read, or refused with the name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO

import pytest
from comfyui_onediff_guard.headless.hosts.input_images import frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated_bytes
from PIL import Image
from tiers import drawn

EXAMPLES = drawn(2_000, 30)


def encoded(kind: str, mode: str, **options: object) -> bytes:
    data = BytesIO()
    pictures = [Image.new(mode, (12, 9), shade) for shade in (0, 1, 200)]
    more = {"save_all": True, "append_images": pictures[1:]} if kind in ("GIF", "WEBP", "TIFF") else {}
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    pictures[0].save(data, kind, exif=exif, **more, **options)
    return data.getvalue()


SEEDS = [
    encoded("PNG", "RGBA"),
    encoded("PNG", "P"),
    encoded("PNG", "I;16"),
    encoded("JPEG", "RGB"),
    encoded("JPEG", "CMYK"),
    encoded("WEBP", "RGB"),
    encoded("GIF", "L"),
    encoded("BMP", "RGB"),
    encoded("TIFF", "RGB"),
    encoded("TIFF", "F"),
    encoded("TIFF", "L", compression="tiff_lzw"),
]


def test_the_seeds_are_read() -> None:
    for data in SEEDS:
        assert frames(data)[0].rgba.shape in ((9, 12, 4), (12, 9, 4))


def test_a_damaged_image_is_read_or_refused(figure: Callable[[str, object], None]) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(data=st.sampled_from(SEEDS).flatmap(mutated_bytes))
    def damaged(data: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about what is damaged
            try:
                read = frames(data)
            except ValueError as error:
                with pytest.raises(ValueError, match=r"^the image cannot be read"):
                    raise error from None
            else:
                assert all(frame.rgba.ndim == 3 and frame.rgba.shape[2] == 4 for frame in read)

    damaged()
    figure("damaged images: errors that no message was made for", f"0 of {EXAMPLES:,}")
