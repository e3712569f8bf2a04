"""Who runs a step: diffusers' own module, plain and compiled whole, and the denoiser that our samplers are given.

All of a process share one set of weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.compile.backends import choose_backend, compiled
from comfyui_onediff_guard.pipelines.run.denoiser import guarded_denoiser
from comfyui_onediff_guard.pipelines.weights.components import ComponentStore
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.policy import Component, Precision
from denoisers import Call, Model, Size, build, step
from faulty import faulty
from measure import Step
from random_model import handle, store

COMPILER = "inductor"  # of diffusers' module, compiled whole


@dataclass(frozen=True)
class Subject:
    """What all contestants of a process run."""

    name: str
    model: Model
    size: Size
    device: torch.device
    dtype: str  # "bf16" or "fp16"

    @cached_property
    def components(self) -> ComponentStore:
        signature = inspect.signature(_kind(self.model).__init__)
        defaults = {name: each.default for name, each in signature.parameters.items() if name != "self"}
        config = {**defaults, **self.model.config, **self.size.config}
        return self._store(config, lambda dtype: build(self.model, self.size, self.device, dtype))

    @cached_property
    def failing(self) -> ComponentStore:
        """Of the same denoiser, in which one layer puts out a NaN in half precision."""
        return self._store(self.module.config, lambda _: faulty(self.module, self.model.fails))

    def _store(self, config: Any, make: Callable[[torch.dtype], torch.nn.Module]) -> ComponentStore:
        return store(self.name, self.model.family, config, make, self.device)

    @property
    def module(self) -> Any:
        return self.components.module(self.model.family.denoiser, self.dtype)

    @cached_property
    def call(self) -> Call:
        """One step's arguments in the denoiser's dtype."""
        return self._step(DTYPES[self.dtype])

    @cached_property
    def given(self) -> Call:
        """The same as our samplers hand it over: the guard casts."""
        return self._step(torch.float32)

    def _step(self, dtype: torch.dtype) -> Call:
        return step(self.model, self.module.config, self.size, self.device, dtype)


Contestant = Callable[[Subject], Step]


def eager(subject: Subject) -> Step:
    module, call = subject.module, subject.call
    return lambda: module(**call)


def whole(subject: Subject) -> Step:
    module, call = torch.compile(subject.module, backend=COMPILER), subject.call
    return lambda: module(**call)


def blocks(subject: Subject) -> Step:
    """What our samplers compile, called as diffusers calls its own."""
    choice = choose_backend("inductor", subject.device)
    module, call = compiled(subject.module, subject.model.family.blocks, choice), subject.call
    return lambda: module(**call)


def ours(backend: str, scope: Scope = Scope.STEP, *, fails: bool = False, plain: bool = False) -> Contestant:
    """The guarded denoiser, as our samplers make it and hand it to diffusers; in fp16 with a wide stream if it has one.

    fails: one layer fails in half precision at every step.
    plain: in 'fp16 (plain)', neither wide nor guarded.
    """

    def make(subject: Subject) -> Step:
        precision = Precision.FP16_PLAIN if plain else Precision(subject.dtype)
        components = subject.failing if fails else subject.components
        return Ours(subject, components, backend, precision, GuardPolicy(scope=scope))

    return make


class Ours:
    """One step of it, and what its report says by now."""

    def __init__(
        self, subject: Subject, components: ComponentStore, backend: str, precision: Precision, policy: GuardPolicy
    ):
        self._pipeline = handle(components, precision, backend, policy)
        stage = self._pipeline.stage(Component.DENOISER)
        self._report = stage.report
        self._denoiser, self._given = guarded_denoiser(stage), subject.given

    def __call__(self) -> Any:
        with self._pipeline.switched(self._report):
            return self._denoiser(**self._given)

    def facts(self) -> dict[str, Any]:
        report, learned = self._report, self._report.learned
        made: dict[str, Any] = {"steps": len(report.steps), "reruns": report.reruns, "backend": report.backend}
        if report.wide:
            made["wide"] = report.wide
        if learned and learned.wide_parts:
            made["wide_parts"] = list(learned.wide_parts)
        if learned and learned.islands:
            made["islands"] = list(learned.islands)
        return made


EAGER, AGAIN, WHOLE, OURS = "diffusers", "diffusers again", "diffusers, torch.compile whole", "ours, inductor"
RERUN = "ours, inductor: every step rerun"
PLAIN = "ours, inductor, fp16 (plain)"
GROUPS: dict[str, dict[str, Contestant]] = {  # timed side by side
    "steps": {
        EAGER: eager,
        AGAIN: eager,
        WHOLE: whole,
        "ours, inductor, without the guard": blocks,
        OURS: ours("inductor"),
        "ours, eager": ours("eager"),
        "ours, oneflow": ours("oneflow"),
        "ours, nexfort": ours("nexfort"),
        "ours, inductor: a learned island": ours("inductor", Scope.LEARNED, fails=True),
    },
    "fp16": {
        EAGER: eager,
        AGAIN: eager,
        WHOLE: whole,
        OURS: ours("inductor"),
        PLAIN: ours("inductor", plain=True),
    },
    "rerun": {OURS: ours("inductor"), RERUN: ours("inductor", fails=True)},  # fewer rounds: fp32 takes its time
}


def entrants(group: str, subject: Subject) -> dict[str, Contestant]:
    """Those of a group that differ for the model's family: without a stream, ours is plain."""
    streams = subject.model.family.stream is not None
    return {name: each for name, each in GROUPS[group].items() if streams or name != PLAIN}


def _kind(model: Model) -> Any:
    import diffusers

    return getattr(diffusers, model.kind)
