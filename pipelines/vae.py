"""The VAE as a pipeline sees it while it samples: an encoder whose every call is guarded."""

from __future__ import annotations

from typing import Any

import torch

from ..precision.guard import StageGuard
from ..precision.policy import Component, Precision
from ..precision.report import RunReport
from ..precision.shells import as_float32
from ..precision.upcast import run_in_fp32
from .handle import PipelineHandle


def guarded_encoder(handle: PipelineHandle, request: Precision | None) -> tuple[torch.nn.Module, RunReport]:
    """A shell of the VAE whose `encode` is a guarded stage, and that stage's report.

    The weights are in the decoder's dtype, as they are there once; where the plan wants fp32 for encoding alone, they
    are upcast as it computes. Latents are drawn in float32, so that a seed draws the same in every precision. The
    shell says float32 and asks for no upcast: diffusers would cast the shared weights themselves.
    """
    plan = handle.plan(Component.VAE_ENCODE, request)
    report = handle.report(plan)
    vae: Any = handle.store.module("vae", handle.plan(Component.VAE_DECODE, request).dtype)
    report.notes += handle.store.notes["vae"]

    def moments(pixels: torch.Tensor) -> torch.Tensor:
        return vae.encode(pixels).latent_dist.parameters

    def moments_in_fp32(pixels: torch.Tensor) -> torch.Tensor:
        return run_in_fp32(moments, pixels, tf32=handle.architecture.tf32 and not handle.policy.strict)

    guard = StageGuard(
        "vae_encode",
        moments if plan.half else moments_in_fp32,
        rerun=moments,
        owner=vae,
        dtype=plan.dtype,
        policy=handle.policy_for(plan),
        report=report,
        tf32=handle.architecture.tf32,
    )

    def encode(pixels: torch.Tensor) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(guard(pixels).float()))  # pyright: ignore[reportArgumentType]

    shell: Any = as_float32(vae)
    shell.encode = encode
    shell.register_to_config(force_upcast=False)
    return shell, report
