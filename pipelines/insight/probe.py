"""The numerics probe: runs a few sampling steps in fp32, measures every layer's max |x|, and recommends a plan."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from typing import Any

import torch

from ...precision.overrides import NOTHING
from ...precision.probe import Probe, ProbeResult, recommend
from ...precision.report import RunReport
from ...precision.shallow_copy import reporting, with_forward
from ...trust.message import BadInput
from ..compile.block import Tell
from ..run.handle import PipelineHandle, profile_of, save_profile, update_cache
from ..run.sample import SampleSettings, StepDone, sample
from ..run.stage import ComponentStage


def probe(
    handle: PipelineHandle,
    positive: torch.Tensor | None,
    negative: torch.Tensor | None,
    settings: SampleSettings,
    *,
    image: Any = None,
    step_done: StepDone | None = None,
    tell: Tell | None = None,
) -> ProbeResult:
    """Sample in fp32 and measure every layer. Arguments and errors as in `sample`. Also raises BadInput without a
    prompt, for models with two denoisers, and in parallel runs."""
    family, model, card = handle.family, handle.store.model, handle.architecture
    if family.prompt and (positive is None or negative is None):
        raise BadInput("{} needs a prompt: wire positive and negative from Encode Prompt.", model.variant.name)
    if family.also_denoise:
        raise BadInput(
            "{} denoises with two transformers, but the probe measures only one. Sample with a NaN Guard of scope "
            "'learned' instead: it finds failing layers in both.",
            model.variant.name,
        )
    if not handle.ranks.alone:
        raise BadInput("Numerics Probe measures all tokens in one process: run its workflow without --gpus.")
    watches: list[Probe] = []
    profiles = {dtype: profile_of(handle, family.denoiser, dtype) for dtype in ("fp16", "bf16")}

    def denoiser(stage: ComponentStage) -> torch.nn.Module:
        watches.append(Probe(stage.module, stage.blocks))
        return _watched(stage, watches[0])

    def on_step(done: int, total: int, report: RunReport) -> None:
        watches[0].end_step()
        if step_done:
            step_done(done, total, report)

    started, options = time.perf_counter(), {"image": image, "step_done": on_step, "tell": tell}
    _, report = sample(handle, positive, negative, settings, denoiser=denoiser, **options)
    seconds = time.perf_counter() - started
    probed, plan = watches[0].probed, report.plan
    chosen = recommend(probed, plan.dtype, native_bf16=card.native_bf16)
    steps = [f"set precision to '{chosen.dtype}'"] * (chosen.dtype != plan.dtype or (plan.half and not plan.guarded))
    from_the_start = chosen.dtype == "fp16" and model.variant.protected  # the plan has overflow protection then
    learned = NOTHING if from_the_start else chosen.learned.to_share
    if learned.in_words():
        steps.append("wire `profile` into the NaN Guard's `profile`, and set its scope to 'learned'")
    profile = None if chosen.dtype == "fp32" else replace(profiles[chosen.dtype], learned=learned)
    frames = f", {settings.frames} frames" if settings.frames > 1 else ""
    sampled = f"{settings.width}×{settings.height}{frames}, seed {settings.seed}"
    return ProbeResult(model.name, card, plan, sampled, probed, seconds, chosen, "; ".join(steps), profile)


def keep_profile(handle: PipelineHandle, found: ProbeResult) -> str:
    """Keep the recommendation for later runs with scope 'learned', in this process and others. Returns a message."""
    if found.profile is None or found.profile.learned == NOTHING:
        return "nothing to keep: the recommended precision needs no profile"
    own = replace(handle, profile=None)
    key = own.memory_key(handle.family.denoiser, found.profile.dtype)
    update_cache(own, key, found.profile.learned)
    save_profile(own, key)
    return f"kept as {found.profile.name}"


def usual_size(handle: PipelineHandle, width: int, height: int, frames: int) -> tuple[int, int, int]:
    """Sizes in pixels and frames; for each 0, what the model's config says that it was made for. Raises BadInput where
    the config does not say."""
    family, model = handle.family, handle.store.model
    usual = family.usual_size(model.denoiser_config, family.layout.spatial(model.vae_config))
    width, height, frames = (given or known for given, known in zip((width, height, frames), usual, strict=True))
    if not (width and height and frames):
        raise BadInput("{} has no known default size: set width, height and frames.", model.name)
    return width, height, frames


def _watched(stage: ComponentStage, probe: Probe) -> torch.nn.Module:
    """Return a copy of the denoiser that computes in fp32, watched by `probe`."""
    original, weights = stage.module, stage.weights
    signature, copy = inspect.signature(original.forward), weights.shell(original)
    guard = stage.guard(original, stage.in_fp32(copy), rerun=copy, dtype="fp32")

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        stage.place()
        with weights:
            return probe.watch(lambda: guard(**given))

    shell = with_forward(original, forward)
    return reporting(shell, dtype=torch.float32, device=stage.handle.store.placement.device)
