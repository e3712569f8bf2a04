"""Previews of a run on its node, as ComfyUI's own samplers show them.

ComfyUI's own are off by default, since they cost as much as a step on some cards. Ours cost almost nothing, so they are
shown unless the user has chosen "none".
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from . import host
from .compat import unless_changed

if TYPE_CHECKING:
    import torch

    from ..pipelines.run.previews import Previews, ToPicture


_FLAG = "--preview-method"


def previews(progress: host.Progress) -> Previews | None:
    """Return the previews that are shown with a run's progress; None without ComfyUI, or if they are turned off."""
    method = _method()
    if method == "none" or not host.in_comfyui():
        return None
    from ..pipelines.run.previews import Previews

    return Previews(progress.show, partial(_to_picture, small_decoder=method == "taesd"))


def _method() -> str:
    """Return the preview method by the page's settings, else by the command line: "none", "auto", "latent2rgb",
    "taesd"; "" if neither sets one."""
    for extra_data in host.running_extra_data():
        if (asked := extra_data.get("preview_method") or "default") != "default":
            return asked
    chosen = getattr(getattr(host.arguments(), "preview_method", None), "value", "none")
    said = any(argument.split("=")[0] == _FLAG for argument in sys.argv)
    return chosen if said or chosen != "none" else ""


@unless_changed("previews in ComfyUI's colours", None)
def _to_picture(kind: str, *, small_decoder: bool) -> ToPicture | None:
    """Return ComfyUI's function from a kind of latents to a picture: its small decoder, if that is chosen and its file
    is in models/vae_approx, else its colour factors; None if it has neither."""
    from ..pipelines.run.previews import picture

    latent_format = getattr(sys.modules["comfy.latent_formats"], kind, None) if kind else None
    if latent_format is None:
        return None
    known = latent_format()

    def scaled(latents: torch.Tensor) -> torch.Tensor:
        video = getattr(known, "latent_dimensions", 2) == 3  # 0.0.1 knows only images
        return known.process_in(latents[None, :, None] if video else latents[None])

    if small_decoder:
        latent_preview: Any = sys.modules["latent_preview"]
        management: Any = sys.modules["comfy.model_management"]
        device = management.get_torch_device()
        decoder = latent_preview.get_previewer(device, known)
        if type(decoder).__name__.startswith("TAE"):  # its file is there
            return lambda latents: decoder.decode_latent_to_preview(scaled(latents.to(device)))
    if not (factors := known.latent_rgb_factors):
        return None
    bias = getattr(known, "latent_rgb_factors_bias", None)
    return lambda latents: picture(scaled(latents).flatten(0, -3), factors, bias)
