"""The denoiser that a diffusers pipeline is given: guard over compiled blocks over a wide stream over the original."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.attention import Attended
from ...precision.findings import Anatomy
from ...precision.guard import Scope, StageGuard
from ...precision.islands import Attempt, half_attempt
from ...precision.learned import NOTHING, Learned
from ...precision.learning import Learner
from ...precision.observe import BlockOutputs
from ...precision.report import RunReport
from ...precision.shells import as_float32, with_forward
from ...precision.upcast import run_in_fp32
from ..compile.backends import came_to, compiled, for_dtype
from ..compile.oneflow_graphs import graphs_folder
from ..families.table import ENCODERS
from ..models.lora import keys
from ..weights.offload import Onloading
from .attention import with_attention
from .handle import PipelineHandle
from .lessons import recall, remember


def guarded_denoiser(handle: PipelineHandle, report: RunReport) -> torch.nn.Module:
    """A shell of the denoiser that runs as the report's plan says. The original, which it shares weights with, is
    loaded for it and not touched."""
    original, weights = loaded_denoiser(handle, report)
    steps = _Steps(handle, report, original, weights)
    return as_float32(with_forward(original, steps), handle.store.placement.device)


def loaded_denoiser(handle: PipelineHandle, report: RunReport) -> tuple[torch.nn.Module, Onloading]:
    """The denoiser as the report's plan says, with the pipeline's LoRAs, and how its weights come to the device."""
    store, name = handle.store, handle.family.denoiser
    original = store.denoiser(report.plan.dtype, handle.loras, handle.offload)
    report.notes += store.notes[name]
    return original, store.onloading(name, handle.offload, handle.loras)


def denoiser_guard(
    handle: PipelineHandle,
    report: RunReport,
    original: torch.nn.Module,
    weights: Onloading,
    attempt: Callable[..., Any] | Learner,
    dtype: str = "fp32",
    **options: Any,
) -> StageGuard:
    """The guard of a denoiser's calls. options: of StageGuard, in place of the handle's."""
    given: dict[str, Any] = {
        "policy": handle.policy_for(report.plan),
        "inputs": handle.family.denoiser_inputs,
        "tf32": handle.architecture.tf32,
    }
    rerun = weights.shell(original)
    return StageGuard("denoiser", attempt, rerun=rerun, owner=original, dtype=dtype, report=report, **given | options)


def in_fp32(handle: PipelineHandle, module: torch.nn.Module) -> Callable[..., Any]:
    """The module's call, in fp32 whatever its weights are in."""
    return partial(run_in_fp32, module, tf32=handle.tf32)


class _Steps:
    """Calls of the denoiser in one run. It returns float32, so that guidance and scheduler compute in that."""

    def __init__(self, handle: PipelineHandle, report: RunReport, original: torch.nn.Module, weights: Onloading):
        self._handle = handle
        self._report = report
        self._original = original
        self._weights = weights
        self._signature = inspect.signature(original.forward)
        self._known, notes = _known(handle, report, original)
        report.notes += notes
        self._guard: StageGuard | None = None
        self._attempts: _Attempts | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._report.steps:
            self._handle.finish(*ENCODERS)
        with self._weights:
            output = self._step(**self._signature.bind(*args, **kwargs).arguments)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.float, output)

    def _step(self, **kwargs: Any) -> Any:
        self._guard = self._guard or self._planned(kwargs)
        output = self._guard(**kwargs)
        if learned := self._guard.learned:
            remember(self._handle, self._report.plan.dtype, learned)
        self._report.learned = learned
        if self._attempts:
            self._attempts.tell_backend()
        return output

    def _planned(self, inputs: Mapping[str, Any]) -> StageGuard:
        dtype = self._report.plan.dtype
        attempts = _Attempts(self._handle, self._report, self._original, self._weights, inputs)
        self._attempts = attempts
        learner = Learner(self._original, dtype, attempts.build, attempts.anatomy, self._known)
        given = self._handle, self._report, self._original, self._weights, learner, dtype
        return denoiser_guard(*given, peak_inside=attempts.peak_inside)


class _Attempts:
    """Makes the denoiser as the plan and what was learned ask for: with a wide stream, compiled, with islands, or
    itself."""

    def __init__(
        self,
        handle: PipelineHandle,
        report: RunReport,
        original: torch.nn.Module,
        weights: Onloading,
        inputs: Mapping[str, Any],
    ):
        self._handle = handle
        self._report = report
        self._original = original
        self._weights = weights
        self._backend = for_dtype(handle.backend, handle.architecture, report.plan.dtype)
        self._how, self._attention = with_attention(handle, self._backend.name, report.plan.dtype, inputs)
        self._compiled: torch.nn.Module | None = None  # a shell of the latest attempt's
        self._compiles = True  # the latest attempt is compiled, where there is a backend that does
        self.tell_backend()
        self._block_outputs = BlockOutputs()
        self.anatomy = Anatomy.of(original, handle.family.blocks, handle.family.stream)

    def build(self, learned: Learned) -> Attempt:
        handle, store, report = self._handle, self._handle.store, self._report
        dtype, loras = report.plan.dtype, keys(handle.loras)
        backend, how = self._backend, self._how

        def in_blocks(half: torch.nn.Module, wide: bool) -> torch.nn.Module:
            key = (backend.name, how, dtype, wide, report.plan.accumulation, loras)
            if key not in store.compiled:
                store.compiled[key] = compiled(
                    half,
                    handle.family.blocks,
                    backend,
                    how,
                    device=handle.store.placement.device,
                    graphs=graphs_folder(handle, report.plan, wide=wide),
                )
            self._compiled = store.compiled[key]
            self.tell_backend()
            return self._compiled

        made = half_attempt(
            self._original,
            self.anatomy,
            learned,
            dtype,
            wide=report.plan.wide,
            compiled=in_blocks,
            onloaded=self._weights.shell,
            device=store.placement.device,
            tf32=handle.tf32,
        )
        report.wide = made.in_words
        self._compiles = not made.everything
        self.tell_backend()
        if handle.family.clips and dtype == "fp16" and not report.wide:
            made = replace(made, run=self._block_outputs.watched(made.run, handle.family.blocks[0]))
        if backend.name == "eager" and how.attention:  # what is compiled has it inside
            made = replace(made, run=Attended(made.run, how.attention))
        return made

    def tell_backend(self) -> None:
        """Say in the report which one runs, and why: 'auto' may have gone on to another while it compiled."""
        if not self._compiles:
            self._report.backend, self._report.backend_reason = "eager", "nothing is compiled with every layer wide"
            return
        backend = came_to(self._compiled, self._backend) if self._compiled else self._backend
        said = [backend.reason, self._handle.compile_options.in_words(backend.name), self._attention]
        self._report.backend = backend.name
        self._report.backend_reason = "; ".join(filter(None, said))

    def peak_inside(self) -> torch.Tensor | None:
        """max |x| of the latest attempt's block outputs, where the family clips them."""
        return self._block_outputs.take()


def _known(handle: PipelineHandle, report: RunReport, denoiser: torch.nn.Module) -> tuple[Learned, tuple[str, ...]]:
    """What earlier runs taught, where this one learns, and what to say about it."""
    plan = report.plan
    if not plan.half or handle.policy_for(plan).scope is not Scope.LEARNED:
        return NOTHING, ()
    anatomy = Anatomy.of(denoiser, handle.family.blocks, handle.family.stream)
    return recall(handle, plan.dtype, anatomy.parts(dict(denoiser.named_modules())))
