"""The numerics probe for ComfyUI's own MODELs: a sampling run of ComfyUI's, in fp32, and what every layer reaches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..pipelines.probing import Measured, Probing
from ..precision.arch import detect
from ..precision.dtypes import DTYPES
from ..precision.findings import Anatomy
from ..precision.guard import GuardPolicy, StageGuard
from ..precision.policy import Component, Plan
from ..precision.probe import Verdict, judge, recommend
from ..precision.report import RunReport
from ..precision.upcast import run_in_fp32
from .comfy_calls import ModelCall, apply_model, apply_model_in_fp32, around_apply_model, comfy_plan, wrapped


@dataclass(frozen=True)
class KSampling:
    """As ComfyUI's KSampler takes it."""

    steps: int
    cfg: float
    sampler: str
    scheduler: str
    seed: int


def probe_model(
    patcher: Any,
    positive: list[Any],
    negative: list[Any],
    latent: dict[str, Any],
    sampling: KSampling,
    step_done: Callable[[int], None],
) -> Probing:
    """Sample with a schedule of a few steps, all of them in fp32, and measure.

    patcher: a MODEL (ComfyUI's ModelPatcher), not changed. latent: a LATENT. step_done: is told how many are done.
    Raises BadInput where ComfyUI is too old, GuardStopped where fp32 is not finite either.
    """
    runs: list[_Run] = []

    def watched(call: ModelCall) -> Any:
        if not runs:
            runs.append(_Run(call))
        return runs[0].call(call)

    def on_step(step: int, *_: Any) -> None:
        runs[0].measured.probe.end_step()
        step_done(step + 1)

    model = wrapped(patcher, {"APPLY_MODEL": around_apply_model(watched)})
    comfy = sys.modules["comfy.sample"]
    samples = comfy.fix_empty_latent_channels(model, latent["samples"])
    comfy.sample(
        model,
        comfy.prepare_noise(samples, sampling.seed, latent.get("batch_index")),
        sampling.steps,
        sampling.cfg,
        sampling.sampler,
        sampling.scheduler,
        positive,
        negative,
        samples,
        noise_mask=latent.get("noise_mask"),
        callback=on_step,
        disable_pbar=True,
        seed=sampling.seed,
    )
    shape = "×".join(map(str, samples.shape))
    return runs[0].probing(f"latents {shape}, cfg {sampling.cfg:g}, seed {sampling.seed}")


class _Run:
    """The calls of one run, the first of which shows what the model is."""

    def __init__(self, call: ModelCall):
        self.card = detect(call.device)
        self.plan = comfy_plan(Component.DENOISER, call.name, call.dtype)
        self.report = RunReport(call.name, str(self.card), self.plan)
        self.measured = Measured(call.network, Anatomy.of(call.network, _lists_of_blocks(call.network)))
        self._guard = StageGuard(
            "denoiser",
            partial(run_in_fp32, apply_model_in_fp32, tf32=self.card.tf32),
            owner=call.network,
            dtype="fp32",
            policy=GuardPolicy(),
            report=self.report,
        )

    def call(self, call: ModelCall) -> Any:
        arguments = call.arguments
        return self.measured.call(lambda: self._guard(**arguments), lambda: apply_model(**arguments))

    def probing(self, sampled: str) -> Probing:
        probed, steps = self.measured.probe.probed, self.report.steps
        chosen = recommend(probed, self.plan.dtype, native_bf16=self.card.native_bf16, islands=False)
        calls_per_step = -(-len(steps) // max(len(probed.steps), 1))
        return Probing(
            model=self.report.variant,
            architecture=self.card,
            plan=self.plan,
            sampled=sampled,
            probed=probed,
            timesteps=tuple(step.timestep for step in steps[::calls_per_step]),
            seconds=self.measured.seconds,
            healthy_seconds=self.measured.healthy_seconds * len(steps),
            chosen=chosen,
            verdicts=tuple(judge(probed, dtype, islands=False) for dtype in DTYPES),
            to_apply=_to_apply(self.plan, chosen),
        )


def _lists_of_blocks(network: torch.nn.Module) -> list[str]:
    """Parts that hold more than single layers: a UNet's input_blocks, Flux's double_blocks."""
    inside = {name: [*part.children()] for name, part in network.named_children()}
    return [name for name, layers in inside.items() if any([*layer.children()] for layer in layers)]


def _to_apply(plan: Plan, chosen: Verdict) -> str:
    if chosen.dtype == plan.dtype:
        return ""
    return (
        f"put Model Compute Dtype, set to '{chosen.dtype}', behind the model, or start ComfyUI with "
        f"--{chosen.dtype}-unet; or keep {plan.dtype}, and have NaN Guard (MODEL) compute the steps that fail in fp32"
    )
