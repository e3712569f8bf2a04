"""What CogView3-Plus and CogView4 share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..parallel.plan import ContextPlan
from .components import Extent, Transformer, Width
from .spec import Config, SizeRule, without_values

ZAI = "https://huggingface.co/zai-org"
SIZES = SizeRule(pixel_multiple=32, pixels=(64, 2048))  # their authors: multiples of 32, best from 512 on


class CogView(Transformer):
    """What the denoisers of CogView3-Plus and CogView4 share."""

    condition_dim: Width
    pos_embed_max_size: Extent
    rope_axes_dim: Annotated[list[Width], Field(min_length=2, max_length=2)]
    sample_size: Width


def context(**every: int) -> ContextPlan:
    """Return how several GPUs share a call. every: arguments of each block that have a row for each token of the
    picture, and the dimension of those."""
    return ContextPlan(
        tokens=lambda config, shape: (shape[2] // config["patch_size"]) * (shape[3] // config["patch_size"]),
        first={"hidden_states": 1, "encoder_hidden_states": 1},
        every=every,
        text="encoder_hidden_states",
    )


def usual_size(config: Config, pixels: int) -> tuple[int, int, int]:
    """Return width and height in pixels, and one frame. pixels: those of a latent's side."""
    side = config.get("sample_size", 0) * pixels
    return side, side, 1


def step_inputs(
    config: Config, latents: tuple[int, ...], _options: Config, *, batch: int, tokens: int
) -> dict[str, Any]:
    """Return the arguments of a call with a batch of prompts that have so many tokens."""
    sizes = dict.fromkeys(("original_size", "target_size", "crop_coords"), (batch, 2))
    return without_values(
        hidden_states=(batch, config["in_channels"], *latents[2:]),
        encoder_hidden_states=(batch, tokens, channels(config)),
        timestep=(batch,),
        **sizes,
    )


def channels(config: Config) -> int:
    """Return how many channels a text embedding has."""
    return config.get("text_embed_dim", 4096)
