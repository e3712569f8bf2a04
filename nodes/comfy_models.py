"""ComfyUI's own MODEL and VAE under the guard: on a copy that shares the weights, with nothing patched elsewhere.

A MODEL is guarded through ComfyUI's wrappers: around `apply_model`, and around a whole sampling run, for its report.
A VAE has no wrappers, so its copy gets a shell of the network whose `decode` and `encode` are guarded tile by tile.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch

from ..pipelines.errors import BadInput
from ..precision.accumulation import accumulation, decide
from ..precision.arch import detect, present
from ..precision.clips import Clips
from ..precision.guard import GuardPolicy, StageGuard
from ..precision.policy import Component
from ..precision.report import RunReport
from . import host
from .comfy_calls import ModelCall, apply_model, apply_model_in_fp32, around_apply_model, comfy_plan, wrapped
from .comfy_products import rerun_from

logger = logging.getLogger(__name__)

_UNGUARDED = "onediff_guard_unguarded"


def guarded_model(patcher: Any, policy: GuardPolicy, node_id: str | None) -> Any:
    """A clone of a MODEL (ComfyUI's ModelPatcher) that is guarded. A guard that it had before is replaced.

    Raises BadInput where ComfyUI is too old to have the wrappers.
    """
    guard = _ModelGuard(policy, node_id)
    return wrapped(patcher, {"OUTER_SAMPLE": guard.sample, "APPLY_MODEL": around_apply_model(guard.apply_model)})


def guarded_vae(vae: Any, policy: GuardPolicy, node_id: str | None) -> Any:
    """A copy of a VAE that is guarded. A guard that it had before is replaced.

    Raises BadInput where there is no VAE in it, or another pack has replaced one of its methods.
    """
    vae = getattr(vae, _UNGUARDED, vae)
    network = getattr(vae, "first_stage_model", None)
    if network is None:
        raise BadInput("There is no VAE in this checkpoint. Use a VAE loader in its place.")
    guard, copied, shell = _Guarding(policy, node_id), copy.copy(vae), copy.copy(network)
    for name, component in (("decode", Component.VAE_DECODE), ("encode", Component.VAE_ENCODE)):
        shell.__dict__[name] = _guarded_network(guard, vae, component, getattr(network, name))
    copied.first_stage_model = shell
    for name in ("decode", "decode_tiled", "encode", "encode_tiled"):
        if name in vars(vae):
            raise BadInput(f"Another node has replaced this VAE's '{name}'. Put the NaN Guard before that node.")
        setattr(copied, name, _as_one_run(guard, getattr(copied, name)))
    setattr(copied, _UNGUARDED, vae)
    return copied


@dataclass(frozen=True)
class _Stage:
    """What one guard guards."""

    model: str  # its name, for people
    component: Component
    network: torch.nn.Module
    dtype: torch.dtype  # it computes in
    device: torch.device
    attempt: Callable[..., Any]
    rerun: Callable[..., Any]


class _Guarding:
    """The runs of one guarded MODEL or VAE, each with a report of its own, which is shown on the guard's node."""

    def __init__(self, policy: GuardPolicy, node_id: str | None):
        self._policy = policy
        self._node_id = node_id
        self._runs: list[_Run] = []  # those that are going on: a sampler may start another

    @contextmanager
    def run(self, steps: int = 0) -> Generator[_Run]:
        """steps: of the sampler; 0 where each call counts as one."""
        run = _Run(self._policy, self._node_id, steps)
        self._runs.append(run)
        try:
            yield run
        finally:
            self._runs.remove(run)
            run.end()

    def call(self, make_stage: Callable[[], _Stage], *args: Any, **kwargs: Any) -> Any:
        """One guarded call, in the run that is going on; else in one of its own."""
        if self._runs:
            return self._runs[-1].call(make_stage, *args, **kwargs)
        with self.run() as run:
            return run.call(make_stage, *args, **kwargs)


class _Run:
    def __init__(self, policy: GuardPolicy, node_id: str | None, steps: int):
        self._policy = policy
        self._node_id = node_id
        self._steps = steps
        self._guard: StageGuard | None = None
        self._reference = ""  # what a rerun computes from, where that needs a word
        self._switched: Callable[[], Any] = partial(nullcontext, ())  # bf16 and fp32 need no switch

    def call(self, make_stage: Callable[[], _Stage], *args: Any, **kwargs: Any) -> Any:
        self._guard = self._guard or self._guarding(make_stage())
        report = self._guard.report
        before = report.reruns + report.failed
        with self._switched() as report.switches:
            made = self._guard(*args, **kwargs)
        if report.reruns + report.failed > before:
            last = report.steps[-1]
            host.say(self._node_id, f"call {last.step + 1}: {last.note or last.outcome}")
        return made

    def end(self) -> None:
        """Show the report on the node, and write it to the log."""
        if self._guard is None or not self._guard.report.steps:
            return
        report = self._guard.report
        report.calls_per_step = -(-len(report.steps) // self._steps) if self._steps else 1
        notes = dict.fromkeys(step.note for step in report.steps if step.note)
        if report.reruns and self._reference:
            report.note(self._reference)
        if any(switch.set_by == "onediff-guard" for switch in report.switches):
            report.note(f"half-precision accumulation: {report.plan.accumulation} ({report.plan.accumulation_reason})")
        text = "\n".join((report.summary(), *list(notes)[:1], *report.notes))
        host.say(self._node_id, text)
        logger.log(logging.WARNING if notes or report.failed else logging.INFO, "NaN Guard: %s", text)

    def _guarding(self, stage: _Stage) -> StageGuard:
        architecture, plan = detect(stage.device), comfy_plan(stage.component, stage.model, stage.dtype)
        if plan.dtype == "fp16":
            others = present()
            decision = decide(architecture, others=others)
            why = {"accumulation_reason": decision.reason_on(architecture), "accumulation_source": decision.source}
            plan = replace(plan, accumulation=decision.mode.value, **why)
            self._switched = partial(accumulation, architecture, others=others)
        clips = Clips(plan.dtype)
        self._reference = rerun_from(stage.network)
        return StageGuard(
            stage.component.value,
            clips.watched(stage.attempt),
            rerun=stage.rerun,
            owner=stage.network,
            dtype=plan.dtype,
            policy=self._policy,
            report=RunReport(stage.model, str(architecture), plan),
            tf32=architecture.tf32,
            peak_inside=clips.take,
        )


# --- MODEL ------------------------------------------------------------------------------------------------------------


class _ModelGuard(_Guarding):
    """Of a MODEL: what its two wrappers do. `executor` goes on with the chain, and ends in ComfyUI itself."""

    def sample(
        self, executor: Any, noise: Any, latent_image: Any, sampler: Any, sigmas: Any, *more: Any, **by_name: Any
    ) -> Any:
        with self.run(steps=len(sigmas) - 1):
            return executor(noise, latent_image, sampler, sigmas, *more, **by_name)

    def apply_model(self, call: ModelCall) -> Any:
        return self.call(lambda: _denoiser(call), **call.arguments)


def _denoiser(call: ModelCall) -> _Stage:
    return _Stage(
        model=call.name,
        component=Component.DENOISER,
        network=call.network,
        dtype=call.dtype,
        device=call.device,
        attempt=apply_model,
        rerun=apply_model_in_fp32,
    )


# --- VAE --------------------------------------------------------------------------------------------------------------


def _guarded_network(
    guard: _Guarding, vae: Any, component: Component, method: Callable[..., Any]
) -> Callable[..., Any]:
    network = vae.first_stage_model

    def stage() -> _Stage:
        return _Stage(type(network).__name__, component, network, vae.vae_dtype, vae.device, method, method)

    return wraps(method)(lambda *args, **kwargs: guard.call(stage, *args, **kwargs))


def _as_one_run(guard: _Guarding, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with guard.run():
            return method(*args, **kwargs)

    return run
