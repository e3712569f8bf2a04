"""How a family lays out its latents: from the sampler to what a VAE decodes, and from there to frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Config = Mapping[str, Any]
Decode = Callable[..., "torch.Tensor"]  # the guarded VAE: latents, options → video or images


@dataclass(frozen=True)
class Layout:
    """Latents travel unscaled, as a VAE takes them and as ComfyUI's own nodes have them."""

    dimensions: int
    shape: str  # for error messages
    counts_frames: bool  # a video, not images
    channels: Callable[[Config], int]  # VAE config → latent channels
    unscaled: Callable[[torch.Tensor, int, Config], torch.Tensor]  # (sampler's latents, frames, VAE config) → latents
    decoded: Callable[[Decode, torch.Tensor, int], Iterator[torch.Tensor]]  # (VAE, latents, chunk) → [n, 3, h, w] each


def temporal_factor(config: Config) -> int:
    return int(config["temporal_compression_ratio"])


def spatial_factor(config: Config) -> int:
    return 2 ** (len(config.get("block_out_channels", (1, 1, 1, 1))) - 1)


def _latent_channels(config: Config) -> int:
    return config.get("latent_channels", 16)


def _unscaled_video(latents: torch.Tensor, frames: int, config: Config) -> torch.Tensor:
    """[batch, frames, channels, height, width] → [batch, channels, frames, height, width].

    The 1.5 layout pads in front to a multiple of its temporal patch; the padding is dropped.
    """
    wanted = (frames - 1) // temporal_factor(config) + 1
    latents = latents[:, latents.shape[1] - wanted :].permute(0, 2, 1, 3, 4)
    return 1 / config["scaling_factor"] * latents


def _decoded_video(vae: Decode, latents: torch.Tensor, _chunk: int) -> Iterator[torch.Tensor]:
    yield vae(latents).permute(0, 2, 1, 3, 4).flatten(0, 1)


def _unscaled_images(latents: torch.Tensor, _frames: int, config: Config) -> torch.Tensor:
    return latents / config["scaling_factor"]


def _decoded_images(vae: Decode, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    yield from map(vae, latents.split(chunk or len(latents)))


def _unscaled_frames(latents: torch.Tensor, _frames: int, config: Config) -> torch.Tensor:
    """[1, frames, channels, height, width] → [frames, channels, height, width], as ComfyUI's own SVD has them."""
    return 1 / config["scaling_factor"] * latents.flatten(0, 1)


def _decoded_frames(vae: Decode, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """In chunks of frames: the decoder looks at neighbours within a chunk, so it needs to know how many they are."""
    for part in latents.split(chunk or len(latents)):
        yield vae(part, num_frames=len(part))


COGVIDEOX = Layout(
    5, "[batch, {channels}, frames, height, width]", True, _latent_channels, _unscaled_video, _decoded_video
)
IMAGES = Layout(4, "[batch, {channels}, height, width]", False, _latent_channels, _unscaled_images, _decoded_images)
FRAMES = Layout(4, "[frames, {channels}, height, width]", True, _latent_channels, _unscaled_frames, _decoded_frames)
