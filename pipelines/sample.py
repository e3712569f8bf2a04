"""Prompt embeddings → latents, by the diffusers pipeline's own denoising loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..precision.policy import Component, Precision
from ..precision.report import RunReport
from .denoiser import guarded_denoiser
from .errors import BadInput
from .handle import PipelineHandle

StepDone = Callable[[int, int, RunReport], None]  # steps done, steps in all, report so far; raises to interrupt


@dataclass(frozen=True)
class SampleSettings:
    width: int  # pixels
    height: int  # pixels
    frames: int
    steps: int
    guidance_scale: float  # 1 or less: no classifier-free guidance, the negative prompt is not used
    seed: int
    scheduler: str  # a key of the family's schedulers


def sample(
    handle: PipelineHandle,
    positive: torch.Tensor,
    negative: torch.Tensor,
    settings: SampleSettings,
    *,
    request: Precision | None = None,
    step_done: StepDone | None = None,
) -> tuple[torch.Tensor, RunReport]:
    """Denoise. Returns latents [batch, channels, latent frames, height/8, width/8] for the VAE, and the report.

    positive, negative: [batch, tokens, channels] embeddings.
    Latents and scheduler stay in float32, and noise is drawn on the CPU, so that a seed gives the same noise in every
    precision and on every card; the guard casts what enters the denoiser to the plan's dtype.
    Raises BadSize, BadInput before anything is loaded; GuardStopped where a step cannot be saved.
    """
    handle.family.sizes.check(width=settings.width, height=settings.height, frames=settings.frames)
    _check_embeddings(handle, positive, negative)
    plan = handle.plan(Component.DENOISER, request)
    report = handle.report(plan)
    pipe = _pipeline(handle, report, settings.scheduler)
    device = handle.store.placement.device

    def on_step_end(_pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step_done:
            step_done(step + 1, settings.steps, report)
        return values

    try:
        with handle.switched(report), torch.no_grad():
            latents = pipe(
                prompt_embeds=positive.to(device, torch.float32),
                negative_prompt_embeds=negative.to(device, torch.float32),
                width=settings.width,
                height=settings.height,
                num_frames=settings.frames,
                num_inference_steps=settings.steps,
                guidance_scale=settings.guidance_scale,
                generator=torch.Generator("cpu").manual_seed(settings.seed),
                callback_on_step_end=on_step_end,
                output_type="latent",
            ).frames
    finally:
        handle.finish(handle.family.denoiser)
    return _to_vae_space(handle, latents, settings.frames).cpu(), report


def _pipeline(handle: PipelineHandle, report: RunReport, scheduler: str) -> Any:
    import diffusers

    folder, family = handle.store.folder, handle.family
    scheduler_class = getattr(diffusers, family.schedulers[scheduler])
    pipe = getattr(diffusers, family.pipeline)(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=guarded_denoiser(handle, report),
        scheduler=scheduler_class.from_config(handle.store.unweighted("scheduler").config),
    )
    spatial, temporal = _vae_factors(folder.vae_config)
    pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal = spatial, temporal
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _check_embeddings(handle: PipelineHandle, positive: torch.Tensor, negative: torch.Tensor) -> None:
    config = handle.store.folder.denoiser_config
    channels, tokens = config.get("text_embed_dim", 4096), config.get("max_text_seq_length", 226)
    for name, embeddings in (("positive", positive), ("negative", negative)):
        if embeddings.ndim != 3 or embeddings.shape[-1] != channels or embeddings.shape[1] != tokens:
            raise BadInput(
                f"'{name}' has shape {tuple(embeddings.shape)}, but {handle.store.folder.variant.name} takes "
                f"[batch, {tokens}, {channels}]. Wire it to an Encode Prompt node that gets the same pipeline."
            )
    if positive.shape != negative.shape:
        raise BadInput(
            f"'positive' has shape {tuple(positive.shape)} and 'negative' {tuple(negative.shape)}; they must agree. "
            "Take both from one Encode Prompt node."
        )


def _vae_factors(config: Any) -> tuple[int, int]:
    return 2 ** (len(config.get("block_out_channels", (1, 1, 1, 1))) - 1), int(config["temporal_compression_ratio"])


def _to_vae_space(handle: PipelineHandle, latents: torch.Tensor, frames: int) -> torch.Tensor:
    """[batch, frames, channels, height, width] as sampled → [batch, channels, frames, height, width], unscaled.

    The 1.5 layout pads in front to a multiple of its temporal patch; the padding is dropped.
    """
    config = handle.store.folder.vae_config
    wanted = (frames - 1) // _vae_factors(config)[1] + 1
    latents = latents[:, latents.shape[1] - wanted :].permute(0, 2, 1, 3, 4)
    return 1 / config["scaling_factor"] * latents
