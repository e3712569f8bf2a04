"""What CogView3-Plus and CogView4 share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .components import Extent, Transformer, Width
from .layouts import Config
from .spec import SizeRule

ZAI = "https://huggingface.co/zai-org"
SIZES = SizeRule(pixel_multiple=32, pixels=(64, 2048))  # their authors: multiples of 32, best from 512 on


class CogView(Transformer):
    """What the denoisers of CogView3-Plus and CogView4 share."""

    condition_dim: Width = 1
    pos_embed_max_size: Extent = 1
    rope_axes_dim: Annotated[list[Width], Field(min_length=2, max_length=2)] = []
    sample_size: Width = 1


def usual_size(config: Config, pixels: int) -> tuple[int, int, int]:
    """Return width and height in pixels, and one frame. pixels: those of a latent's side."""
    side = config.get("sample_size", 0) * pixels
    return side, side, 1


def channels(config: Config) -> int:
    """Return how many channels a text embedding has."""
    return config.get("text_embed_dim", 4096)
