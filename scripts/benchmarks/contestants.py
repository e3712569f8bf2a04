"""The contestants of a step: diffusers' module (eager, compiled, by block), and the denoiser that our samplers use.

entrants.py chooses the contestants of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.compile.backends import MODES, CompileOptions, choose_backend, compiled
from comfyui_onediff_guard.pipelines.run.denoiser import guarded_denoiser
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.precision.accumulation import Accumulation
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules
from measure import Step
from random_model import handle
from subject import Subject

COMPILER = "inductor"  # for diffusers' module
DEFAULT, TUNED = MODES
Contestant = Callable[[Subject], Step]


def eager(subject: Subject) -> Step:
    return _step(subject, subject.module)


def whole(mode: str = DEFAULT) -> Contestant:
    """Compile the whole module."""
    return lambda subject: _step(subject, torch.compile(subject.module, backend=COMPILER, mode=_mode(mode)))


def by_block(mode: str = DEFAULT) -> Contestant:
    """Compile its repeated blocks, without our code."""
    return lambda subject: _step(subject, compiled_by_block(subject.module, subject.model.family.blocks, mode))


def compiled_by_block(module: Any, parts: tuple[str, ...], mode: str = DEFAULT) -> Any:
    """Do the same as diffusers' `compile_repeated_blocks`, but in a shallow copy: the module does not change.

    parts: the parts that our samplers compile, for classes without repeated blocks.
    """
    repeated = getattr(module, "_repeated_blocks", None) or ()
    named = [name for name, part in module.named_modules() if type(part).__name__ in repeated]

    def compile_block(block: torch.nn.Module) -> Any:
        if isinstance(block, torch.nn.ModuleList):
            return torch.nn.ModuleList(map(compile_block, block))
        return torch.compile(block, backend=COMPILER, mode=_mode(mode))

    return replace_submodules(module, dict.fromkeys(named or parts, compile_block))


def blocks(subject: Subject) -> Step:
    """Compile what our samplers compile, and call it as diffusers does."""
    choice = choose_backend("inductor", subject.device)
    return _step(subject, compiled(subject.module, subject.model.family.blocks, choice))


def offloaded(kind: str) -> Contestant:
    """Make a copy in main memory, with diffusers' group offload: "block_level", of one block, or "leaf_level"."""

    def make(subject: Subject) -> Step:
        subject = subject.in_main_memory()
        module: Any = subject.module
        step = _step(subject, module)

        def as_pipelines_do() -> Any:
            with torch.inference_mode(False), torch.no_grad():
                return step()

        with torch.inference_mode(False):
            module.enable_group_offload(
                onload_device=subject.device,
                offload_type=kind,
                num_blocks_per_group=1 if kind == "block_level" else None,
                use_stream=subject.device.type == "cuda",
            )
        return BlockOffload(as_pipelines_do)

    return make


def channels_last(make: Contestant) -> Contestant:
    return lambda subject: make(subject.channels_last)


def in_bf16(make: Contestant) -> Contestant:
    return lambda subject: make(subject.in_bf16)


def summing_in_fp16(make: Contestant) -> Contestant:
    """Make matrix products accumulate in fp16: twice as fast on some cards."""

    def summing(subject: Subject) -> Step:
        step = make(subject)

        def run() -> Any:
            with fp16_sums():
                return step()

        return run

    return summing


@contextmanager
def fp16_sums() -> Generator[None]:
    """Switch fp16 accumulation on. Raises AttributeError if PyTorch lacks the switch."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = True
    try:
        yield
    finally:
        matmul.allow_fp16_accumulation = before


def ours(
    backend: str,
    scope: Scope = Scope.STEP,
    *,
    fails: bool = False,
    plain: bool = False,
    mode: str = DEFAULT,
    offload: Offload = Offload.NONE,
    sums: Callable[[], AbstractContextManager[None]] = nullcontext,
    accumulation: Accumulation = Accumulation.AUTO,
) -> Contestant:
    """Make the guarded denoiser as our samplers do; in fp16 with an fp32 residual stream if it has one.

    fails: one layer fails in half precision at every step.
    plain: 'fp16 (plain)', neither protected nor guarded.
    sums: a context inside our samplers' own, which also switches accumulation.
    accumulation: the loader's. 'fp16' differs from 'auto' only on a GeForce RTX.
    """

    def make(subject: Subject) -> Step:
        subject = subject.failing if fails else subject
        subject = subject.in_main_memory() if offload.in_parts else subject
        precision = Precision.FP16_PLAIN if plain else Precision(subject.dtype)
        pipeline = handle(subject.components, precision, backend, GuardPolicy(scope=scope), offload)
        pipeline = replace(pipeline, compile_options=CompileOptions(mode=mode), accumulation=accumulation)
        return Ours(subject, pipeline, sums)

    return make


class Ours:
    """One step of the guarded denoiser, and its report so far."""

    def __init__(self, subject: Subject, pipeline: PipelineHandle, sums: Callable[[], AbstractContextManager[None]]):
        self._pipeline = pipeline
        stage = self._pipeline.stage(Component.DENOISER)
        self._report = stage.report
        self._denoiser, self._given, self._sums = guarded_denoiser(stage), subject.given, sums
        self.in_parts, self._in_run = pipeline.offload.in_parts, False

    def __call__(self) -> Any:
        with nullcontext() if self._in_run else self.held():
            return self._denoiser(**self._given)

    @contextmanager
    def held(self) -> Generator[None]:
        """Enter what our samplers enter once per run, not per step: the clock starts inside."""
        with self._pipeline.switched(self._report), self._sums():
            self._in_run = True
            try:
                yield
            finally:
                self._in_run = False

    def facts(self) -> dict[str, Any]:
        report, learned = self._report, self._report.learned
        made: dict[str, Any] = {"steps": len(report.steps), "reruns": report.reruns, "backend": report.backend}
        if report.protection:
            made["protection"] = report.protection
        if learned and learned.fp16_error is not None:
            made["fp16_accumulation"] = learned.fp16_error
        return made


@dataclass(frozen=True)
class BlockOffload:
    """A step with weights in main memory."""

    step: Step
    in_parts: bool = True

    def __call__(self) -> Any:
        return self.step()


def _step(subject: Subject, module: Any) -> Step:
    call = subject.call
    return lambda: module(**call)


def _mode(mode: str) -> str | None:
    return None if mode == DEFAULT else mode
