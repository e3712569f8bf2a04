"""The numerics probe for ComfyUI's own MODELs: a sampling run in fp32, in which every layer is measured."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch

from ..precision.guard import GuardPolicy, StageGuard
from ..precision.layer_peaks import block_names
from ..precision.probe import Probe, ProbeResult, recommend
from ..trust.message import Told, shown
from .compat import what_changed
from .host import is_interrupt
from .model_calls import ModelCall, apply_model_in_fp32, around_apply_model, wrapped
from .native_guards import denoiser_of
from .native_network import profile_of
from .refining import forget_earlier_runs, refining_guarded


class KSampling(NamedTuple):
    """The arguments of ComfyUI's KSampler, in its order, and the seed."""

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
) -> ProbeResult:
    """Sample with a schedule of a few steps, all of them in fp32, and measure every layer.

    patcher: a MODEL (ComfyUI's ModelPatcher), not changed. latent: a LATENT. step_done: called with the steps done.
    Raises NotInComfyUI if ComfyUI is too old, BadInput if the model's dtype is not supported, GuardStopped if fp32 is
    not finite either, ProbeEnded if the model or its sampler raises.
    """
    runs: list[_Run] = []
    done = 0
    starting = threading.Lock()  # with several GPUs, the first calls come from several threads

    def watched(call: ModelCall) -> Any:
        with starting:
            if not runs:
                runs.append(_Run(call))
        return runs[0].call(call)

    def on_step(step: int, *_: Any) -> None:
        nonlocal done
        runs[0].probe.end_step()
        step_done(done := step + 1)

    wrappers = {"PREPARE_SAMPLING": _prepare, "APPLY_MODEL": around_apply_model(watched)}
    model = wrapped(patcher, wrappers)
    comfy = sys.modules["comfy.sample"]
    samples = _start(model, latent)
    noise = comfy.prepare_noise(samples, sampling.seed, latent.get("batch_index"))
    given = (positive, negative, samples)
    how: dict[str, Any] = {"noise_mask": latent.get("noise_mask"), "callback": on_step, "disable_pbar": True}
    try:
        comfy.sample(model, noise, *sampling[:-1], *given, **how, seed=sampling.seed)
    except Exception as error:
        if isinstance(error, (Told, torch.OutOfMemoryError)) or is_interrupt(error) or what_changed(error):
            raise
        name = ModelCall(model.model, {}).name
        why = ": ".join(filter(None, (type(error).__name__, shown(str(error), 300))))
        raise ProbeEnded(
            "The probe of {} failed in step {} of {}: {}. The probe samples like KSampler, but in fp32. Run KSampler "
            "with the same inputs. If it fails too, check the prompts, the latent and the nodes that change the "
            "model. If it works, use NaN Guard (native) and its report instead.",
            name,
            done + 1,
            sampling.steps,
            why,
        ) from error
    shape = "×".join(map(str, samples.shape))
    return runs[0].result(f"latents {shape}, cfg {sampling.cfg:g}, seed {sampling.seed}")


class ProbeEnded(Told, RuntimeError):
    """The model or its sampler raised."""


class _Run:
    """The calls of one run; the first call shows which model it is."""

    def __init__(self, call: ModelCall):
        self._of = denoiser_of(call)
        self._stage = self._of.stage(GuardPolicy())
        blocks = _lists_of_blocks(call.network)
        self.probe = Probe(call.network, block_names(call.network, blocks))
        self._guards: dict[tuple[torch.nn.Module, int], StageGuard] = {}  # by network and thread
        self._started = time.perf_counter()

    def call(self, call: ModelCall) -> Any:
        key = call.network, threading.get_ident()
        guard = self._guards[key] = self._guards.get(key) or self._guard(call.network)
        return self.probe.watch(lambda: guard(**call.arguments), call.network)

    def _guard(self, network: torch.nn.Module) -> StageGuard:
        stage = self._of.stage(GuardPolicy())  # with a report of its own
        attempt = stage.in_fp32(apply_model_in_fp32)
        return stage.guard(network, attempt, rerun=attempt, dtype="fp32", snapshot=self._of.snapshot)

    def result(self, sampled: str) -> ProbeResult:
        probed, plan, card = self.probe.probed, self._stage.plan, self._stage.architecture
        chosen = recommend(probed, plan.dtype, native_bf16=card.native_bf16)
        profile, to_apply = None, f"put NaN Guard (native) after the model, with precision '{chosen.dtype}'"
        if chosen.learned.all_layers_scaled:
            profile = replace(profile_of(self._of, card, chosen.dtype), learned=chosen.learned.to_share)
        if chosen.dtype != plan.dtype:
            to_apply += f"; or keep {plan.dtype}: the guard recomputes failing steps in fp32"
        elif chosen.learned.all_layers_scaled:
            to_apply += "; or with scope 'learned', and `profile` connected to its `profile`"
        else:
            to_apply = ""
        model, seconds = self._of.model, time.perf_counter() - self._started
        return ProbeResult(model, card, plan, sampled, probed, seconds, chosen, to_apply, profile)


def _prepare(executor: Any, *args: Any, **by_name: Any) -> Any:
    """Wrap the loading of the model. Returns its results; text that overflows is refined in fp32."""
    model, *more = executor(*args, **by_name)
    forget_earlier_runs(model)
    return refining_guarded(model, GuardPolicy(), lambda _: None), *more


def _start(patcher: Any, latent: dict[str, Any]) -> torch.Tensor:
    """Return KSampler's start latents. An empty latent gets the model's channels and, in a current ComfyUI, its size,
    by the ratios to pixels and frames in the LATENT."""
    fix = sys.modules["comfy.sample"].fix_empty_latent_channels
    taken = signature(fix).parameters
    return fix(patcher, latent["samples"], **{name: value for name, value in latent.items() if name in taken})


def _lists_of_blocks(network: torch.nn.Module) -> list[str]:
    """Return the names of the network's lists of blocks: a UNet's input_blocks, Flux's double_blocks."""
    inside = {name: [*part.children()] for name, part in network.named_children()}
    return [name for name, layers in inside.items() if any([*layer.children()] for layer in layers)]
