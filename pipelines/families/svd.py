"""Stable Video Diffusion: an image → a video."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...precision.policy import Variant
from ...trust.message import Message
from .components import (
    ComponentSpec,
    Extent,
    Few,
    Fields,
    Layers,
    Levels,
    Number,
    Numbers,
    Positive,
    Sides,
    Vae,
    Width,
    Word,
    Words,
    scheduler,
)
from .spec import FROM_IMAGE, Config, Decode, FamilySpec, Guidance, Layout, SizeRule, latent_channels, without_values

if TYPE_CHECKING:
    import torch


def _variant(name: str, repository: str, frames: int) -> Variant:
    return Variant(
        name,
        "fp16",
        leaves_fp16=False,
        has_stream=False,
        components=FROM_IMAGE,
        source=f"https://huggingface.co/stabilityai/stable-video-diffusion-img2vid{repository}",
        sizes={"num_frames": frames},
        fact=Message("{} is published in fp16", name),
    )


_VARIANTS = (_variant("SVD", "", 14), _variant("SVD-XT", "-xt", 25), _variant("SVD-XT 1.1", "-xt-1-1", 25))


class _UNet(Fields):
    sample_size: Sides | None
    in_channels: Width
    out_channels: Width
    down_block_types: Words
    up_block_types: Words
    block_out_channels: Levels
    addition_time_embed_dim: Width
    projection_class_embeddings_input_dim: Width
    layers_per_block: Few | Annotated[list[Few], Field(max_length=8)]
    cross_attention_dim: Width | Levels
    transformer_layers_per_block: Few | Annotated[list[Few], Field(max_length=8)]
    num_attention_heads: Width | Levels
    num_frames: Extent


class _ClipVision(Fields):
    hidden_size: Width
    intermediate_size: Width
    projection_dim: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_channels: Width
    image_size: Extent
    patch_size: Width
    hidden_act: Word
    layer_norm_eps: Positive
    attention_dropout: Number
    initializer_range: Number
    initializer_factor: Number


class _Pixels(Fields):
    shortest_edge: Extent | None
    longest_edge: Extent | None
    height: Extent | None
    width: Extent | None


class _ClipImages(Fields):
    crop_size: _Pixels | Extent | None
    size: _Pixels | Extent | None
    do_center_crop: bool | None
    do_convert_rgb: bool | None
    do_normalize: bool | None
    do_rescale: bool | None
    do_resize: bool | None
    image_mean: Numbers | Number | None
    image_std: Numbers | Number | None
    resample: Annotated[int, Field(ge=0, le=5)] | None
    rescale_factor: Positive | None


def _usual_size(config: Config, pixels: int) -> tuple[int, int, int]:
    side = config.get("sample_size", 0) * pixels
    wide, high = (1024, 576) if side == 768 else (side, side)  # as many pixels, which the authors advise
    return wide, high, config.get("num_frames", 0)


def _unscaled(latents: torch.Tensor, _frames: int, config: Config) -> torch.Tensor:
    """Undo the VAE's scaling: [1, frames, channels, height, width] → [frames, channels, height, width], the layout that
    ComfyUI's own SVD has."""
    return 1 / config["scaling_factor"] * latents.flatten(0, 1)


def _decoded(vae: Decode, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """Decode in chunks of frames. The decoder looks at neighbours in a chunk, and needs to know how many there are."""
    for part in latents.split(chunk or len(latents)):
        yield vae(part, num_frames=len(part))


def _step_inputs(config: Config, latents: tuple[int, ...], _options: Config) -> dict[str, Any]:
    frames, _, *sides = latents
    return without_values(
        sample=(2, frames, config["in_channels"], *sides),
        timestep=(),
        encoder_hidden_states=(2, 1, config["cross_attention_dim"]),
        added_time_ids=(2, 3),  # frames per second, motion bucket, noise augmentation
    )


_LAYOUT = Layout(
    4, "[frames, {channels}, height, width]", True, latent_channels, _unscaled, _decoded, takes_chunks=True
)

SVD = FamilySpec(
    name="Stable Video Diffusion",
    pipeline="StableVideoDiffusionPipeline",
    components={
        "feature_extractor": ComponentSpec(
            "transformers",
            ("CLIPImageProcessor", "CLIPImageProcessorPil", "CLIPImageProcessorFast"),
            _ClipImages,
            needs=(("preprocessor_config.json", "processor_config.json"),),
        ),
        "image_encoder": ComponentSpec("transformers", ("CLIPVisionModelWithProjection",), _ClipVision),
        "unet": ComponentSpec("diffusers", ("UNetSpatioTemporalConditionModel",), _UNet),
        "vae": ComponentSpec("diffusers", ("AutoencoderKLTemporalDecoder",), Vae),
        "scheduler": scheduler("EulerDiscreteScheduler"),
    },
    denoiser="unet",
    blocks=("down_blocks", "mid_block", "up_blocks"),
    denoiser_inputs=("sample", "encoder_hidden_states"),
    variants=_VARIANTS,
    variant=lambda config: "SVD" if config.get("num_frames", 25) <= 14 else "SVD-XT",  # XT 1.1's config is XT's
    layout=_LAYOUT,
    step_inputs=_step_inputs,
    sizes=SizeRule(pixel_multiple=64, frames=(2, 200), pixels=(64, 4096)),  # diffusers cannot guide a single frame
    usual_size=_usual_size,
    guidance=Guidance(argument="max_guidance_scale", first="min_guidance_scale"),
    latent_format=lambda _config: "SD15",
    takes_image=True,
)

FAMILIES = (SVD,)
