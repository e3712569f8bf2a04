"""Stable Video Diffusion: an image → a video."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...precision.policy import Variant
from ...trust.message import Message
from . import spec
from .spec import Config, FamilySpec

if TYPE_CHECKING:
    import torch


def _variant(name: str, repository: str, frames: int) -> Variant:
    return Variant(
        name,
        "fp16",
        leaves_fp16=False,
        protected=False,
        components=spec.FROM_IMAGE,
        source=f"https://huggingface.co/stabilityai/stable-video-diffusion-img2vid{repository}",
        sizes={"num_frames": frames},
        fact=Message("{} is published in fp16", name),
    )


_VARIANTS = (_variant("SVD", "", 14), _variant("SVD-XT", "-xt", 25), _variant("SVD-XT 1.1", "-xt-1-1", 25))


_CLIP_FIELDS = (
    *("hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers", "num_attention_heads", "num_channels"),
    *("image_size", "patch_size", "hidden_act", "layer_norm_eps", "attention_dropout"),
    *("initializer_range", "initializer_factor"),
)
_PIXELS_FIELDS = (
    *("crop_size", "size", "do_center_crop", "do_convert_rgb", "do_normalize", "do_rescale", "do_resize"),
    *("image_mean", "image_std", "resample", "rescale_factor"),
)


def _usual_size(config: Config, pixels: int) -> tuple[int, int, int]:
    side = config.get("sample_size", 0) * pixels
    wide, high = (1024, 576) if side == 768 else (side, side)  # the authors' size, with as many pixels
    return wide, high, config.get("num_frames", 0)


def _unscaled(latents: torch.Tensor, _frames: int, config: Config) -> torch.Tensor:
    """Undo the VAE's scaling: [1, frames, channels, height, width] → [frames, channels, height, width], the layout of
    ComfyUI's own SVD."""
    return 1 / config["scaling_factor"] * latents.flatten(0, 1)


def _decoded(vae: spec.Decode, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """Decode in chunks of frames. The decoder mixes the frames of a chunk, and needs their number."""
    for part in latents.split(chunk or len(latents)):
        yield vae(part, num_frames=len(part))


def _step_inputs(config: Config, latents: tuple[int, ...], _options: Config) -> dict[str, Any]:
    frames, _, *sides = latents
    return spec.without_values(
        sample=(2, frames, config["in_channels"], *sides),
        timestep=(),
        encoder_hidden_states=(2, 1, config["cross_attention_dim"]),
        added_time_ids=(2, 3),  # frames per second, motion bucket, noise augmentation
    )


SVD = FamilySpec(
    name="Stable Video Diffusion",
    pipeline="StableVideoDiffusionPipeline",
    components={
        "feature_extractor": spec.ComponentSpec(
            "transformers",
            ("CLIPImageProcessor", "CLIPImageProcessorPil", "CLIPImageProcessorFast"),
            _PIXELS_FIELDS,
            needs=(("preprocessor_config.json", "processor_config.json"),),
        ),
        "image_encoder": spec.ComponentSpec("transformers", ("CLIPVisionModelWithProjection",), _CLIP_FIELDS),
        "unet": spec.diffusers_model("UNetSpatioTemporalConditionModel"),
        "vae": spec.diffusers_model("AutoencoderKLTemporalDecoder"),
        "scheduler": spec.scheduler("EulerDiscreteScheduler"),
    },
    denoiser="unet",
    blocks=("down_blocks", "mid_block", "up_blocks"),
    denoiser_inputs=("sample", "encoder_hidden_states"),
    variants=_VARIANTS,
    variant=lambda config: "SVD" if config.get("num_frames", 25) <= 14 else "SVD-XT",  # XT 1.1's config is XT's
    layout=spec.Layout(
        _unscaled, _decoded, dimensions=4, shape="[frames, {channels}, height, width]", takes_chunks=True
    ),
    step_inputs=_step_inputs,
    sizes=spec.SizeRule(pixel_multiple=64, frames=(2, 200), pixels=(64, 4096)),  # diffusers cannot guide a single frame
    usual_size=_usual_size,
    guidance=spec.Guidance(argument="max_guidance_scale", first="min_guidance_scale"),
    latent_format=lambda _config: "SD15",
    takes_image=True,
)

FAMILIES = (SVD,)
