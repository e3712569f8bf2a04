"""A small picture of what a run is making, after each of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import is_interrupt
from ..run.feature import Feature
from ..run.handle import PipelineHandle
from . import predicted, to_rgb

logger = logging.getLogger(__name__)

ToPicture = Callable[[torch.Tensor], Any]  # latents of one frame [channels, rows, columns], as the VAE takes them → PIL


@dataclass(frozen=True)
class Previews:
    """What a host shows while a pipeline samples.

    show: is given a PIL image, of one pixel a latent or more, after each step.
    to_picture: returns what the host makes pictures with of latents of a kind, by ComfyUI's name for it, or None.
    """

    show: Callable[[Any], None]
    to_picture: Callable[[str], ToPicture | None] = lambda _kind: None


class PreviewedRun(Feature):
    """frames: of the video; 1 for images."""

    def __init__(self, previews: Previews, handle: PipelineHandle, frames: int):
        self._previews, self._handle, self._frames = previews, handle, frames

    def wrap_pipeline(self, pipe: Any) -> None:
        preview(self._previews, self._handle, pipe.scheduler, self._frames)


def preview(previews: Previews, handle: PipelineHandle, scheduler: Any, frames: int) -> None:
    """Show each step of a run: of a video its frame in the middle. A run goes on without, where that does not work, or
    nobody has published which colours the model's latents have (CogView's).

    scheduler: the run's own. frames: of the video; 1 for images.
    """
    family, config = handle.family, handle.store.model.vae_config
    to_picture: ToPicture | None = None

    def seen(finished: torch.Tensor) -> None:
        nonlocal to_picture
        if to_picture is None:
            return
        try:
            latents = family.layout.unscaled(finished, frames, config)
            middle = latents[len(latents) // 2] if latents.ndim == 4 else latents[0, :, latents.shape[2] // 2]
            previews.show(to_picture(middle))
        except Exception as error:  # noqa: BLE001, whatever a device or a decoder of others raises
            to_picture = _without(handle, error)

    try:
        kind = family.latent_format(config)
        to_picture = previews.to_picture(kind) or (to_rgb.of_cogvideox if kind == "CogVideoX" else None)
    except Exception as error:  # noqa: BLE001
        _without(handle, error)
    if to_picture:
        predicted.watch(scheduler, seen)


def _without(handle: PipelineHandle, error: Exception) -> None:
    """Go on without previews. Raises the error where it is the user's interrupt, which ComfyUI raises where it is shown
    a picture."""
    if is_interrupt(error):
        raise error
    logger.warning("no previews of %s: %s", handle.store.model.name, error)
