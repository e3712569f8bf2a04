"""How a family lays out its latents: from the sampler to what a VAE decodes, and from there to frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Config = Mapping[str, Any]
Decode = Callable[..., "torch.Tensor"]  # the guarded VAE: latents, options → video or images


def spatial_factor(config: Config) -> int:
    """Return how many pixels a latent's side has, for a VAE of AutoencoderKL's kind."""
    return 2 ** (len(config.get("block_out_channels", (1, 1, 1, 1))) - 1)


@dataclass(frozen=True)
class Layout:
    """How a family lays out its latents. They travel unscaled, as a VAE takes them and as ComfyUI's own nodes have
    them."""

    dimensions: int  # of the latents' shape
    shape: str  # in words, for error messages
    counts_frames: bool  # a video, not images
    channels: Callable[[Config], int]  # VAE config → latent channels
    unscaled: Callable[[torch.Tensor, int, Config], torch.Tensor]  # (sampler's latents, frames, VAE config) → latents
    decoded: Callable[[Decode, torch.Tensor, int], Iterator[torch.Tensor]]  # (VAE, latents, chunk) → [n, 3, h, w] each
    spatial: Callable[[Config], int] = spatial_factor  # VAE config → pixels of a latent's side
    temporal: Callable[[Config], int] = lambda _config: 1  # VAE config → frames of a latent
    surplus: Callable[[int, Config], int] = lambda _latents, _config: 0  # (latent frames, VAE config) → frames that the
    # VAE makes too many of them, in front
    takes_chunks: bool = False  # `decoded` decodes as many at once as it is told to
    cache: str = ""  # argument of the VAE's networks by which a video's chunks hand on what the next one needs
    cache_is_written: bool = False  # that argument is a list which they write to; else they return a new cache

    def latents_shape(self, config: Config, width: int, height: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of the latents of one video or image, as the VAE decodes them.

        config: the VAE's. width, height, frames: of what is made.
        """
        pixels, channels = self.spatial(config), self.channels(config)
        count, sides = (frames - 1) // self.temporal(config) + 1, (height // pixels, width // pixels)
        return (count, channels, *sides) if self.dimensions == 4 else (1, channels, count, *sides)


def without_values(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Return a tensor of each shape, in float32, on "meta"."""
    import torch

    return {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}


def latent_channels(config: Config) -> int:
    """Return how many channels the latents have, as the VAE's config says."""
    return config.get("latent_channels", 16)


def decoded_video(vae: Decode, latents: torch.Tensor, _chunk: int) -> Iterator[torch.Tensor]:
    """Decode latents in one call of the VAE, to [batch · frames, 3, height, width]."""
    yield vae(latents).permute(0, 2, 1, 3, 4).flatten(0, 1)


def _unscaled_images(latents: torch.Tensor, _frames: int, config: Config) -> torch.Tensor:
    return latents / config["scaling_factor"]


def _decoded_images(vae: Decode, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    yield from map(vae, latents.split(chunk or len(latents)))


IMAGES = Layout(
    4,
    "[batch, {channels}, height, width]",
    False,
    latent_channels,
    _unscaled_images,
    _decoded_images,
    takes_chunks=True,
)
