"""Latents → frames."""

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
    request: Precision | None = None,
) -> tuple[torch.Tensor, RunReport]:
    """Decode latents [batch, channels, latent frames, h, w] to [batch · frames, height, width, 3] in 0..1, float32.

    tiling, slicing: decode in overlapping tiles, or one video of a batch at a time; slower, with less memory.
    Raises BadInput where the latents are not this model's; GuardStopped where they or the result are not finite.
    """
    channels = handle.store.folder.vae_config.get("latent_channels", 16)
    if latents.ndim != 5 or latents.shape[1] != channels:
        raise BadInput(
            f"The latents have shape {tuple(latents.shape)}, but {handle.store.folder.variant.name} decodes "
            f"[batch, {channels}, frames, height, width]. Wire them from a {handle.family.name} sampler."
        )
    from diffusers.video_processor import VideoProcessor

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
    try:
        with handle.switched(report), torch.no_grad():
            video = guard(latents.to(handle.store.placement.device)).sample.float()
    finally:
        handle.finish("vae")
    frames: Any = VideoProcessor(vae_scale_factor=8).postprocess_video(video, output_type="pt")
    return frames.flatten(0, 1).permute(0, 2, 3, 1).cpu(), report
