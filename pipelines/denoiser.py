"""The denoiser that a diffusers pipeline is given: the guard over compiled blocks over the fold over the original."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..precision.attention import Attended
from ..precision.dtypes import FP16_MAX
from ..precision.findings import Anatomy
from ..precision.guard import Scope, StageGuard
from ..precision.islands import Attempt, half_attempt
from ..precision.learned import NOTHING, Learned
from ..precision.learning import Learner
from ..precision.observe import BlockOutputs, stream_peak
from ..precision.report import RunReport
from ..precision.shells import as_float32, with_forward
from ..precision.upcast import run_in_fp32
from .attention import with_attention
from .compile import came_to, compiled, for_dtype
from .families import ENCODERS
from .handle import PipelineHandle
from .lora import keys
from .memory import believe, claimed, disbelieve, recall, remember
from .offload import Onloading
from .oneflow_graphs import graphs_folder

CLAIM = 256  # a profile's peak may be so many times what the first call reaches: other prompts and steps peak higher


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
    """Calls of the denoiser in one run. It returns float32, so that guidance and scheduler compute in that.

    Where the plan folds and the stream has not been measured yet, the first step runs in fp32 and measures it, so that
    nothing has to fail first.
    """

    def __init__(self, handle: PipelineHandle, report: RunReport, original: torch.nn.Module, weights: Onloading):
        self._handle = handle
        self._report = report
        self._original = original
        self._weights = weights
        self._signature = inspect.signature(original.forward)
        self._known, self._brought = _known(handle, report, original)
        report.notes += self._brought
        self._guard: StageGuard | None = None
        self._attempts: _Attempts | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._report.steps:
            self._handle.finish(*ENCODERS)
        with self._weights:
            output = self._step(**self._signature.bind(*args, **kwargs).arguments)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.float, output)

    def _step(self, **kwargs: Any) -> Any:
        stream = self._handle.family.stream
        if self._guard is None and self._report.plan.folded and stream and self._known.stream_peak is None:
            outputs: list[Any] = []
            exact = in_fp32(self._handle, self._weights.shell(self._original))
            guard = denoiser_guard(self._handle, self._report, self._original, self._weights, exact)
            peak = stream_peak(self._original, stream, lambda: outputs.append(guard(**kwargs)))
            self._report.stream_peak = peak
            if math.isfinite(peak):
                self._known = replace(self._known, stream_peak=peak)
                remember(self._handle, self._report.plan.dtype, peak)
            return outputs[0]
        self._guard = self._guard or self._planned(kwargs)
        output = self._guard(**kwargs)
        if learned := self._guard.learned:
            remember(self._handle, self._report.plan.dtype, learned.stream_peak, learned.islands)
        self._report.learned = learned
        if self._attempts:
            self._attempts.tell_backend()
            if self._attempts.unproven and (why := self._contradiction(self._attempts)):
                return self._without_profile(why, output, kwargs)
        return output

    def _contradiction(self, attempts: _Attempts) -> str:
        """What the latest call says against a profile's peak; "" where nothing does. Folded too little, the stream
        leaves the range; folded too much, small numbers are lost."""
        bits, outcome = self._report.fold_bits or 0, self._report.steps[-1].outcome
        said, found = self._known.stream_peak or 0.0, attempts.reached(bits)
        claim = f"it says that the residual stream peaks at {said:.3g}, and here that "
        if outcome == "finite":
            if bits and found * CLAIM < said:
                return f"{claim}reaches {found:.3g} in the first call"
            attempts.prove()
            believe(self._handle, self._report.plan.dtype)
        elif not (self._guard and self._guard.learned) and not found <= FP16_MAX * 2.0**bits:
            return f"{claim}leaves fp16's range at 2^-{bits}"
        return ""

    def _without_profile(self, why: str, output: Any, kwargs: Mapping[str, Any]) -> Any:
        """The call's output where it was rerun, else that of another."""
        report = self._report
        report.notes = tuple(note for note in report.notes if note not in self._brought)
        report.note(disbelieve(self._handle, report.plan.dtype, why))
        report.fold_bits = None
        self._known, self._guard, self._attempts = NOTHING, None, None
        if report.steps[-1].outcome == "rerun":
            return output
        report.steps.pop()
        return self._step(**kwargs)

    def _planned(self, inputs: Mapping[str, Any]) -> StageGuard:
        dtype = self._report.plan.dtype
        unproven = self._known.stream_peak is not None and claimed(self._handle, dtype)
        attempts = _Attempts(self._handle, self._report, self._original, self._weights, inputs, unproven)
        self._attempts = attempts
        learner = Learner(self._original, dtype, attempts.build, attempts.anatomy, self._known)
        given = self._handle, self._report, self._original, self._weights, learner, dtype
        return denoiser_guard(*given, peak_inside=attempts.peak_inside)


class _Attempts:
    """Makes the denoiser as the plan and what was learned ask for: folded, compiled, with islands, or itself."""

    def __init__(
        self,
        handle: PipelineHandle,
        report: RunReport,
        original: torch.nn.Module,
        weights: Onloading,
        inputs: Mapping[str, Any],
        unproven: bool,
    ):
        """unproven: what is known of the stream is a profile's word, and the stream is watched."""
        self._handle = handle
        self._report = report
        self._original = original
        self._weights = weights
        self._backend = for_dtype(handle.backend, handle.architecture, report.plan.dtype)
        self._how, self._attention = with_attention(handle, self._backend.name, report.plan.dtype, inputs)
        self._compiled: torch.nn.Module | None = None  # a shell of the latest attempt's
        self.tell_backend()
        self._block_outputs = BlockOutputs()
        self._reached: torch.Tensor | None = None
        self._clips = handle.family.clips and report.plan.dtype == "fp16"
        self.unproven = unproven
        self.anatomy = Anatomy.of(original, handle.family.blocks, handle.family.stream)

    def build(self, learned: Learned) -> Attempt:
        handle, store, report = self._handle, self._handle.store, self._report
        dtype, loras, stream = report.plan.dtype, keys(handle.loras), handle.family.stream
        backend, how = self._backend, self._how

        def in_blocks(folded: torch.nn.Module, bits: int) -> torch.nn.Module:
            key = (backend.name, how, dtype, bits, report.plan.accumulation, loras)
            if key not in store.compiled:
                store.compiled[key] = compiled(
                    folded,
                    handle.family.blocks,
                    backend,
                    how,
                    device=handle.store.placement.device,
                    graphs=graphs_folder(handle, report.plan, bits),
                )
            self._compiled = store.compiled[key]
            self.tell_backend()
            return self._compiled

        made = half_attempt(
            self._original,
            self.anatomy,
            learned,
            dtype,
            compiled=in_blocks,
            onloaded=self._weights.shell,
            tf32=handle.tf32,
        )
        if report.plan.folded or made.bits:
            report.fold_bits = made.bits
        if (self._clips or self.unproven) and stream:
            made = replace(made, run=self._block_outputs.watched(made.run, stream.blocks))
        if backend.name == "eager" and how.attention:  # what is compiled has it inside
            made = replace(made, run=Attended(made.run, how.attention))
        return made

    def tell_backend(self) -> None:
        """Say in the report which one runs, and why: 'auto' may have gone on to another while it compiled."""
        backend = came_to(self._compiled, self._backend) if self._compiled else self._backend
        said = [backend.reason, self._handle.compile_options.in_words(backend.name), self._attention]
        self._report.backend = backend.name
        self._report.backend_reason = "; ".join(filter(None, said))

    def peak_inside(self) -> torch.Tensor | None:
        """max |x| of the latest attempt's block outputs, where the family clips."""
        self._reached = self._block_outputs.take()
        return self._reached if self._clips else None

    def reached(self, bits: int) -> float:
        """max |x| of the residual stream in the latest attempt, were it not scaled by 2^-bits."""
        return math.nan if self._reached is None else self._reached.item() * 2.0**bits

    def prove(self) -> None:
        """What the profile says is true, and the stream need not be watched for it any more."""
        self.unproven = False
        self._block_outputs.watching = self._clips


def _known(handle: PipelineHandle, report: RunReport, denoiser: torch.nn.Module) -> tuple[Learned, tuple[str, ...]]:
    """What earlier runs taught, as far as this one may use it, and what to say about it."""
    plan = report.plan
    learns = handle.policy_for(plan).scope is Scope.LEARNED
    if not plan.half or not (plan.folded or learns):
        return NOTHING, ()
    anatomy = Anatomy.of(denoiser, handle.family.blocks, handle.family.stream)
    learned, notes = recall(handle, plan.dtype, anatomy.parts(dict(denoiser.named_modules())))
    return (learned if learns else Learned(learned.stream_peak)), notes
