"""Pictures of a run on its node, as ComfyUI's own samplers show them.

ComfyUI shows none unless it is told to, since its own cost a step's time on some cards. Ours cost next to nothing, so
they are shown unless somebody said "none".
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from . import host

if TYPE_CHECKING:
    import torch

    from ..pipelines.preview.frames import Previews, ToPicture

logger = logging.getLogger(__name__)

_FLAG = "--preview-method"


def previews(progress: host.Progress) -> Previews | None:
    """Return how a run's previews are shown with its progress; None where nobody would see them, or wants them."""
    method = _method()
    if method == "none" or not host.in_comfyui():
        return None
    from ..pipelines.preview.frames import Previews

    decoder = _small_decoder if method == "taesd" else lambda _kind: None
    return Previews(progress.show, decoder, host.previews_directory())


def _method() -> str:
    """Return what the page's settings ask for, else what the command line does: "none", "auto", "latent2rgb", "taesd";
    "" where neither says anything."""
    queue = getattr(host.server(), "prompt_queue", None)
    for item in list(getattr(queue, "currently_running", {}).values()):
        extra_data = item[3] if isinstance(item, tuple) else {}  # 0.0.1 has a class, and no such setting
        if (asked := extra_data.get("preview_method") or "default") != "default":
            return asked
    chosen = getattr(getattr(host.arguments(), "preview_method", None), "value", "none")
    said = any(argument.split("=")[0] == _FLAG for argument in sys.argv)
    return chosen if said or chosen != "none" else ""


def _small_decoder(kind: str) -> ToPicture | None:
    """Return ComfyUI's own decoder for latents of a kind, which is a file in models/vae_approx; None where there is
    none."""
    latent_format = getattr(sys.modules.get("comfy.latent_formats"), kind, None) if kind else None
    latent_preview: Any = sys.modules.get("latent_preview")
    management: Any = sys.modules.get("comfy.model_management")
    if latent_format is None or latent_preview is None:
        return None
    known, device = latent_format(), management.get_torch_device()
    decoder = latent_preview.get_previewer(device, known)
    if not type(decoder).__name__.startswith("TAE"):  # its file is not there
        return None

    def to_picture(latents: torch.Tensor) -> Any:
        batch = latents[None] if known.latent_dimensions == 2 else latents[None, :, None]
        return decoder.decode_latent_to_preview(known.process_in(batch.to(device)))

    return to_picture
