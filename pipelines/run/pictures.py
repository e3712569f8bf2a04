"""Converts ComfyUI's images to diffusers' input."""

from __future__ import annotations

from typing import Any

import torch

from ...trust.message import BadInput


def fitted(images: torch.Tensor, width: int, height: int, fit: str) -> list[Any]:
    """Return [n, h, w, channels] in 0..1 as n PIL images of width × height, RGB.

    fit: "crop" keeps the aspect ratio and cuts off the sides, "stretch" changes it, "refuse" raises BadInput if the
        size differs.
    Grey becomes RGB; transparent pixels become black. Raises BadInput if it is no image, or not finite.
    """
    from PIL import Image, ImageOps

    if images.ndim != 4 or images.shape[-1] not in (1, 3, 4) or not images.numel():
        raise BadInput(
            "The image has shape {}, but [images, height, width, 1, 3 or 4] is needed. Wire it from Load Image.",
            tuple(images.shape),
        )
    if not torch.isfinite(images).all():
        raise BadInput("The image holds NaN or infinite values. Check the node that made it.")
    found = images.shape[2], images.shape[1]
    if fit == "refuse" and found != (width, height):
        raise BadInput(
            "The image is {}×{}, but the output is {}×{}. Set fit to 'crop' or 'stretch', or resize the image.",
            *(*found, width, height),
        )
    resized, pictures = ImageOps.fit if fit == "crop" else Image.Image.resize, []
    for image in images.float().clamp(0, 1).cpu():
        rgb = image[..., :3] * image[..., 3:] if image.shape[-1] == 4 else image.expand(*image.shape[:2], 3)
        picture = Image.fromarray((rgb * 255).round().to(torch.uint8).numpy())
        if found != (width, height):
            picture = resized(picture, (width, height), Image.Resampling.LANCZOS)
        pictures.append(picture)
    return pictures
