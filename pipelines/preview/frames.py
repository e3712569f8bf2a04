"""A small picture of what a run is making, after each of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...precision.policy import Component
from ..errors import is_interrupt
from ..run import vae
from ..run.calls import Calls
from ..run.handle import PipelineHandle
from ..run.profiles import fingerprint
from . import predicted, to_rgb

logger = logging.getLogger(__name__)

ToPicture = Callable[[torch.Tensor], Any]  # latents of one frame [channels, rows, columns], as the VAE takes them → PIL


@dataclass(frozen=True)
class Previews:
    """What a host shows while a pipeline samples.

    show: is given a PIL image, of one pixel a latent or more, after each step.
    decoder: returns a small decoder for latents of a kind, by ComfyUI's name for it; None where there is none.
    folder: of what was fitted to VAEs; None: nothing is kept.
    """

    show: Callable[[Any], None]
    decoder: Callable[[str], ToPicture | None] = lambda _kind: None
    folder: Path | None = None


def preview(previews: Previews, handle: PipelineHandle, scheduler: Any, frames: int) -> None:
    """Show each step of a run: of a video its frame in the middle. A run goes on without, where that does not work.

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
        to_picture = previews.decoder(family.latent_format(config)) or _by_matrix(handle, previews.folder)
    except Exception as error:  # noqa: BLE001
        _without(handle, error)
    else:
        predicted.watch(scheduler, seen)


def _without(handle: PipelineHandle, error: Exception) -> None:
    """Go on without previews. Raises the error where it is the user's interrupt, which ComfyUI raises where it is shown
    a picture."""
    if is_interrupt(error):
        raise error
    logger.warning("no previews of %s: %s", handle.store.model.name, error)


def _by_matrix(handle: PipelineHandle, folder: Path | None) -> ToPicture:
    model, layout = handle.store.model, handle.family.layout
    name = fingerprint(model.weights["vae"].files, model.vae_config)

    def fit() -> torch.Tensor:
        stage = handle.stage(Component.VAE_DECODE)  # as it will be loaded to decode
        encoder = vae.guarded_encoder(stage, Calls("colours", lambda *_: None))
        picture = to_rgb.picture_to_encode(layout.spatial(model.vae_config))
        video = layout.dimensions == 5
        still = picture.unsqueeze(2).repeat(1, 1, 1 + layout.temporal(model.vae_config), 1, 1) if video else picture
        with torch.no_grad():
            latents = encoder.encode(still.to(handle.store.placement.device)).latent_dist.mode()[0]
        return to_rgb.fitted(picture, latents[:, -1] if video else latents)

    file = folder and folder / f"{name}.json"
    matrix = handle.store.colours
    if matrix is None:
        matrix = handle.store.colours = to_rgb.kept(file, layout.channels(model.vae_config), fit)
    return lambda latents: to_rgb.colours_of(latents, matrix)
