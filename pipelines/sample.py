"""Prompt embeddings → latents, by the diffusers pipeline's own denoising loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..precision.accumulation import accumulation
from ..precision.folding import bits_for, fold, stream_peak
from ..precision.guard import StageGuard, guarded
from ..precision.policy import Component, Precision
from ..precision.report import RunReport
from ..precision.upcast import run_in_fp32
from .compile import compiled
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
        with accumulation(handle.architecture) as switches, torch.no_grad():
            report.switches = switches
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
        transformer=_denoiser(handle, report),
        scheduler=scheduler_class.from_config(handle.store.unweighted("scheduler").config),
    )
    spatial, temporal = _vae_factors(folder.vae_config)
    pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal = spatial, temporal
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _denoiser(handle: PipelineHandle, report: RunReport) -> torch.nn.Module:
    """The shell that the pipeline is given: guard over compiled blocks over the fold over the untouched original.

    Where the plan folds and the stream has not been measured yet, the first step runs in fp32 and measures it, so that
    nothing has to fail first.
    """
    store, family = handle.store, handle.family
    original = store.module(family.denoiser, report.plan.dtype)
    guard: StageGuard | None = None

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal guard
        if guard is None and report.plan.folded and store.stream_peak is None:
            return _measuring_step(handle, report, original, args, kwargs)
        guard = guard or _guard(handle, report, original, report.plan.dtype, _attempt(handle, report, original))
        return guard(*args, **kwargs)

    return guarded(original, step)


def _attempt(handle: PipelineHandle, report: RunReport, original: torch.nn.Module) -> torch.nn.Module:
    """The denoiser as the plan wants it: folded, compiled, or itself."""
    store, family, plan = handle.store, handle.family, report.plan
    if plan.folded and store.stream_peak is not None:
        report.fold_bits = bits_for(store.stream_peak)
    bits = report.fold_bits or 0
    key = (handle.backend.name, plan.dtype, bits)
    if key not in store.compiled:
        folded = fold(original, family.stream, bits) if bits else original
        store.compiled[key] = compiled(folded, family.blocks, handle.backend)
    return store.compiled[key]


def _guard(
    handle: PipelineHandle, report: RunReport, original: torch.nn.Module, dtype: str, attempt: Callable[..., Any]
) -> StageGuard:
    return StageGuard(
        "denoiser",
        attempt,
        rerun=original,
        dtype=dtype,
        policy=handle.policy_for(report.plan),
        report=report,
        inputs=handle.family.denoiser_inputs,
        tf32=handle.architecture.tf32,
    )


def _measuring_step(
    handle: PipelineHandle, report: RunReport, original: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        return run_in_fp32(original, *args, tf32=handle.architecture.tf32 and not handle.policy.strict, **kwargs)

    guard = _guard(handle, report, original, "fp32", in_fp32)
    outputs: list[Any] = []
    peak = stream_peak(original, handle.family.stream, lambda: outputs.append(guard(*args, **kwargs)))
    report.stream_peak = peak
    if math.isfinite(peak):
        handle.store.stream_peak = peak
    return outputs[0]


def _check_embeddings(handle: PipelineHandle, positive: torch.Tensor, negative: torch.Tensor) -> None:
    config = handle.store.folder.denoiser_config
    channels, tokens = config.get("text_embed_dim", 4096), config.get("max_text_seq_length", 226)
    for name, embeddings in (("positive", positive), ("negative", negative)):
        if embeddings.ndim != 3 or embeddings.shape[-1] != channels or embeddings.shape[1] != tokens:
            raise BadInput(
                f"'{name}' has shape {tuple(embeddings.shape)}, but {handle.store.folder.variant} takes "
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
