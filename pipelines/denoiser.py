"""The denoiser that a diffusers pipeline is given: the guard over compiled blocks over the fold over the original."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..precision.accumulation import Mode
from ..precision.folding import bits_for, explain, fold
from ..precision.guard import StageGuard
from ..precision.observe import BlockOutputs, Peak, stream_peak
from ..precision.report import RunReport
from ..precision.shells import as_float32, with_forward
from ..precision.upcast import run_in_fp32
from .compile import compiled, for_dtype
from .handle import PipelineHandle


def guarded_denoiser(handle: PipelineHandle, report: RunReport) -> torch.nn.Module:
    """A shell of the denoiser that runs as the report's plan says. The original, which it shares weights with, is
    loaded for it and not touched."""
    original = handle.store.module(handle.family.denoiser, report.plan.dtype)
    report.notes += handle.store.notes[handle.family.denoiser]
    return as_float32(with_forward(original, _Steps(handle, report, original)))


class _Steps:
    """Calls of the denoiser in one run. It returns float32, so that guidance and scheduler compute in that.

    Where the plan folds and the stream has not been measured yet, the first step runs in fp32 and measures it, so that
    nothing has to fail first.
    """

    def __init__(self, handle: PipelineHandle, report: RunReport, original: torch.nn.Module):
        self._handle = handle
        self._report = report
        self._original = original
        self._signature = inspect.signature(original.forward)
        self._guard: StageGuard | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._step(**self._signature.bind(*args, **kwargs).arguments)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.float, output)

    def _step(self, **kwargs: Any) -> Any:
        stream = self._handle.family.stream
        if self._guard is None and self._report.plan.folded and stream and self._handle.store.stream_peak is None:
            outputs: list[Any] = []
            guard = self._guarding("fp32", self._in_fp32)
            peak = stream_peak(self._original, stream, lambda: outputs.append(guard(**kwargs)))
            self._report.stream_peak = peak
            if math.isfinite(peak):
                self._handle.store.stream_peak = peak
            return outputs[0]
        self._guard = self._guard or self._planned()
        return self._guard(**kwargs)

    def _planned(self) -> StageGuard:
        handle, plan = self._handle, self._report.plan
        attempt = self._attempt()
        stream = handle.family.stream
        if not (handle.family.clips and stream and plan.dtype == "fp16"):
            return self._guarding(plan.dtype, attempt)
        outputs = BlockOutputs()
        return self._guarding(plan.dtype, outputs.watched(attempt, stream.blocks), peak_inside=outputs.take)

    def _attempt(self) -> torch.nn.Module:
        """The denoiser as the plan wants it: folded, compiled, or itself."""
        handle, store, report = self._handle, self._handle.store, self._report
        backend = for_dtype(handle.backend, handle.architecture, report.plan.dtype)
        report.backend, report.backend_reason = backend.name, backend.reason
        if report.plan.folded and store.stream_peak is not None:
            report.fold_bits = bits_for(store.stream_peak)
        bits = report.fold_bits or 0
        key = (backend.name, report.plan.dtype, bits, report.plan.accumulation)
        if key not in store.compiled:
            stream = handle.family.stream
            folded = fold(self._original, stream, bits) if bits and stream else self._original
            half_accumulation = report.plan.accumulation == Mode.ON.value
            store.compiled[key] = compiled(folded, handle.family.blocks, backend, half_accumulation=half_accumulation)
        return store.compiled[key]

    def _guarding(
        self, dtype: str, attempt: Callable[..., Any], peak_inside: Callable[[], torch.Tensor | None] | None = None
    ) -> StageGuard:
        handle = self._handle
        return StageGuard(
            "denoiser",
            attempt,
            rerun=self._original,
            dtype=dtype,
            policy=handle.policy_for(self._report.plan),
            report=self._report,
            inputs=handle.family.denoiser_inputs,
            tf32=handle.architecture.tf32,
            peak_inside=peak_inside,
            explain=self._explain if handle.family.stream and dtype == "fp16" else None,
        )

    def _in_fp32(self, *args: Any, **kwargs: Any) -> Any:
        tf32 = self._handle.architecture.tf32 and not self._handle.policy.strict
        return run_in_fp32(self._original, *args, tf32=tf32, **kwargs)

    def _explain(self, peaks: Mapping[str, Peak]) -> str:
        stream = self._handle.family.stream
        assert stream is not None
        return explain(peaks, stream, self._original, self._report.fold_bits or 0)
