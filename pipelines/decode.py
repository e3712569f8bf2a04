"""Latents → frames or images."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..precision.guard import StageGuard
from ..precision.policy import Component, Precision
from ..precision.report import RunReport
from .errors import BadInput
from .handle import PipelineHandle


def decode(
    handle: PipelineHandle,
    latents: torch.Tensor,
    *,
    tiling: bool = False,
    slicing: bool = False,
    chunk: int = 0,
    request: Precision | None = None,
) -> tuple[torch.Tensor, RunReport]:
    """Decode latents, in the family's layout, to [frames or images, height, width, 3] in 0..1, float32.

    tiling, slicing: decode in overlapping tiles, or one video of a batch at a time; slower, with less memory.
    chunk: frames or images decoded at once, where the VAE takes them apart (SVD, CogView); 0: all.
    Raises BadInput where the latents are not this model's; GuardStopped where they or the result are not finite.
    """
    layout, config = handle.family.layout, handle.store.folder.vae_config
    channels = layout.channels(config)
    if latents.ndim != layout.dimensions or latents.shape[1] != channels:
        raise BadInput(
            f"The latents have shape {tuple(latents.shape)}, but {handle.store.folder.variant.name} decodes "
            f"{layout.shape.format(channels=channels)}. Wire them from a {handle.family.name} sampler."
        )
    plan = handle.plan(Component.VAE_DECODE, request)
    report = handle.report(plan)
    vae: Any = copy.copy(handle.store.module("vae", plan.dtype))
    report.notes += handle.store.notes["vae"]
    vae.use_tiling, vae.use_slicing = tiling, slicing
    guard = StageGuard(
        "vae_decode",
        vae.decode,
        dtype=plan.dtype,
        policy=handle.policy_for(plan),
        report=report,
        tf32=handle.architecture.tf32,
    )

    def decoded(part: torch.Tensor, **options: Any) -> torch.Tensor:
        return guard(part, **options).sample.float()

    try:
        with handle.switched(report), torch.no_grad():
            latents = latents.to(handle.store.placement.device)
            pixels = torch.cat([part.cpu() for part in layout.decoded(decoded, latents, chunk)])
    finally:
        handle.finish("vae")
    return (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1), report
