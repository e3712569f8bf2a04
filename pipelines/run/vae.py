"""The VAE as a pipeline sees it: its encoder or decoder is guarded call by call.

A VAE calls its network once for each tile and chunk of frames, and a video's chunks hand on a cache. Guarded there, a
failure costs one chunk in fp32: the first whose output or cache is bad.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...precision.findings import Anatomy
from ...precision.guard import StageGuard
from ...precision.islands import Attempt, half_attempt
from ...precision.learned import Learned
from ...precision.learning import Learner
from ...precision.policy import Component, Precision
from ...precision.report import RunReport
from ...precision.shells import Make, as_float32, replaced, with_forward
from ...precision.upcast import run_in_fp32
from .calls import Calls, calls_of_vae
from .handle import PipelineHandle

_BLOCKS = ("down_blocks", "mid_block", "up_blocks")  # of diffusers' encoders and decoders


def guarded_decoder(handle: PipelineHandle, request: Precision | None, calls: Calls) -> tuple[Any, RunReport]:
    """A shell of the VAE whose `decode` is guarded, and that stage's report. calls: tells the decoder's."""
    return _guarded(handle, Component.VAE_DECODE, "decoder", "post_quant_conv", request, calls)


def guarded_encoder(handle: PipelineHandle, request: Precision | None, calls: Calls) -> tuple[Any, RunReport]:
    """A shell of the VAE whose `encode` is guarded, and that stage's report. calls: counts and tells the encoder's.

    The weights are the decoder's, as they are there once. Latents are drawn in float32, so that a seed draws the same
    in every precision. The shell says float32 and asks for no upcast: diffusers would cast the shared weights
    themselves.
    """
    vae, report = _guarded(handle, Component.VAE_ENCODE, "encoder", "quant_conv", request, calls)

    def encode(pixels: torch.Tensor) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        calls.total += calls_of_vae(vae, lambda counting: counting.encode(pixels.to("meta")))
        moments = vae.encode(pixels).latent_dist.parameters.float()
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(moments))  # pyright: ignore[reportArgumentType]

    shell: Any = as_float32(vae)
    shell.encode = encode
    shell.register_to_config(force_upcast=False)
    return shell, report


def _guarded(
    handle: PipelineHandle, component: Component, part: str, conv: str, request: Precision | None, calls: Calls
) -> tuple[Any, RunReport]:
    """part: the network. conv: the 1×1 convolution between it and the latents, which some VAEs have; it costs nothing
    and runs in fp32."""
    plan = handle.plan(component, request)
    report = handle.report(plan)
    vae: Any = handle.store.module("vae", handle.plan(Component.VAE_DECODE, request).dtype)
    report.notes += handle.store.notes["vae"]
    network = vae.get_submodule(part)
    guard = StageGuard(
        component.value,
        _learning(network, report, handle.tf32) if plan.half else partial(run_in_fp32, network, tf32=handle.tf32),
        rerun=network,
        dtype=plan.dtype,
        policy=handle.policy_for(plan),
        report=report,
        inputs=("conv_cache",),
        tf32=handle.architecture.tf32,
    )
    shells: dict[str, Make] = {part: lambda _network: with_forward(network, calls.telling(guard))}
    if getattr(vae, conv, None) is not None:
        shells[conv] = lambda module: with_forward(module, partial(run_in_fp32, module))
    return replaced(vae, shells), report


def _learning(network: torch.nn.Module, report: RunReport, tf32: bool) -> Learner:
    parts = [name for name in _BLOCKS if getattr(network, name, None) is not None]
    anatomy, plan = Anatomy.of(network, parts), report.plan

    def build(known: Learned) -> Attempt:
        made = half_attempt(network, anatomy, known, plan.dtype, everything=plan.wide, tf32=tf32)
        report.wide = made.in_words
        return made

    return Learner(network, plan.dtype, build, anatomy)
