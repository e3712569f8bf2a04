"""Previews: a small picture after each step of a run; of a video, its middle frame.

A preview shows the scheduler's prediction of the finished latents, by published factors: the red, green and blue of
each latent channel.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from ..errors import is_interrupt
from .feature import Feature

if TYPE_CHECKING:
    from .handle import PipelineHandle

logger = logging.getLogger(__name__)

ToPicture = Callable[[torch.Tensor], Any]  # latents of one frame [channels, rows, columns], as the VAE takes them → PIL

# Factors for CogVideoX's latents as its denoiser makes them: the VAE's times 0.7 (CogVideoX-5B's scaling_factor; the 2B
# model has the same VAE). From kijai's ComfyUI-CogVideoXWrapper, latent_preview.py, to four digits.
COGVIDEOX_SCALE = 0.7
COGVIDEOX = (
    (0.1195, 0.0992, -0.0048), (-0.0012, 0.0550, 0.0213), (-0.0141, -0.0087, -0.0210), (0.0306, 0.1219, 0.0140),
    (0.0927, 0.0303, 0.0508), (0.0379, 0.0494, 0.0586), (0.0177, 0.0088, 0.0360), (0.1061, 0.0234, 0.0572),
    (0.1274, -0.0110, 0.0433), (-0.0187, 0.0822, 0.1061), (0.0084, 0.0762, 0.0930), (0.1294, 0.1236, 0.0448),
    (0.0457, 0.0411, -0.0177), (0.0002, -0.0140, 0.0533), (0.0808, 0.1155, -0.0215), (-0.0152, -0.0058, 0.0722),
)  # fmt: skip


@dataclass(frozen=True)
class Previews:
    """What a host shows while a pipeline samples."""

    show: Callable[[Any], None]  # is given a PIL image, of one pixel a latent or more, after each step
    # returns what the host makes pictures with of latents of a kind, by ComfyUI's name for it, or None
    to_picture: Callable[[str], ToPicture | None] = lambda _kind: None


class PreviewedRun(Feature):
    """The run feature of previews. Without published factors (CogView's), or if previews fail, the run has none.
    frames: of the video; 1 for images."""

    def __init__(self, previews: Previews, handle: PipelineHandle, frames: int):
        self._previews, self._handle, self._frames = previews, handle, frames
        self._to_picture: ToPicture | None = None

    def wrap_pipeline(self, pipe: Any) -> None:
        try:
            kind = self._handle.family.latent_format(self._handle.store.model.vae_config)
            self._to_picture = self._previews.to_picture(kind) or (of_cogvideox if kind == "CogVideoX" else None)
        except Exception as error:  # noqa: BLE001, whatever a device or a host's decoder raises
            self._give_up(error)
        if self._to_picture:
            watch_predictions(pipe.scheduler, self._show)

    def _show(self, finished: Callable[[], torch.Tensor]) -> None:
        if self._to_picture is None:
            return
        try:
            family, config = self._handle.family, self._handle.store.model.vae_config
            latents = family.layout.unscaled(finished(), self._frames, config)
            middle = latents[len(latents) // 2] if latents.ndim == 4 else latents[0, :, latents.shape[2] // 2]
            self._previews.show(self._to_picture(middle))
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if is_interrupt(error):  # ComfyUI raises a user's interrupt while it shows a picture
            raise error
        logger.warning("no previews of %s: %s", self._handle.store.model.name, error)
        self._to_picture = None


def watch_predictions(scheduler: Any, seen: Callable[[Callable[[], torch.Tensor]], None]) -> None:
    """Call `seen` at each step of a diffusers scheduler, with a function that returns its prediction of the finished
    latents, in the shape of its samples.

    scheduler: used for this run alone, since its `step` is replaced.
    """
    step = scheduler.step
    signature = inspect.signature(step)

    @wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        seen(lambda: _finished(scheduler, made, signature.bind(*args, **kwargs).arguments))
        return made

    scheduler.step = stepped


def _finished(scheduler: Any, made: Any, given: Mapping[str, Any]) -> torch.Tensor:
    """Return the predicted latents. made: result of the scheduler's `step`. given: arguments of `step`, by name."""
    told = made[1:] if isinstance(made, tuple) else [getattr(made, "pred_original_sample", None)]
    if told and told[0] is not None:
        return told[0]
    if scheduler.config.get("predict_x0") and hasattr(scheduler, "model_outputs"):  # UniPC predicts them
        return scheduler.model_outputs[-1]
    sigma = scheduler.sigmas[scheduler.step_index - 1]  # a flow scheduler
    return given["sample"] - sigma * given["model_output"]


def picture(latents: torch.Tensor, factors: Sequence[Sequence[float]], bias: Sequence[float] | None = None) -> Any:
    """Return latents [channels, rows, columns] as a PIL image of columns × rows pixels.

    factors: [channels, 3], and bias: [3], to colours from -1 to 1. Raises ValueError for another number of channels.
    """
    from PIL import Image

    if len(latents) != len(factors):
        raise ValueError(f"the latents have {len(latents)} channels, but preview colours are known for {len(factors)}")
    colours = latents.float().cpu().movedim(0, -1) @ torch.tensor(factors) + torch.tensor(bias or (0.0, 0.0, 0.0))
    levels = ((colours + 1) * 127.5).nan_to_num(0).clamp(0, 255).round()
    return Image.fromarray(levels.to(torch.uint8).numpy())


def of_cogvideox(latents: torch.Tensor) -> Any:
    """Return a picture of one frame's latents, as CogVideoX's VAE takes them."""
    return picture(latents * COGVIDEOX_SCALE, COGVIDEOX)
