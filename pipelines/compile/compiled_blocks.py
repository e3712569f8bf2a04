"""The run features for compiled blocks and for the attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...precision.after_failure import HalfPrecisionForward
from ...precision.attention import Attended
from ...precision.planned_layers import KnownPeaks
from ...precision.report import RunReport, StepRecord
from ..models.lora import keys
from ..run.feature import CallFeature, DenoiserSetup, Feature, RunContext, Tell
from . import auto_compile
from .backends import EAGER, BackendChoice, came_to, compiled, for_dtype
from .block import graphs_compiled, graphs_from_cache, listening

if TYPE_CHECKING:
    from ..run.handle import PipelineHandle


class CompiledRun(Feature):
    def __init__(self, run: RunContext):
        self._run = run

    @contextmanager
    def around_run(self) -> Generator[None]:
        run = self._run
        with while_compiling(run.handle, run.report, run.tell):
            yield
        if run.compile_key:
            auto_compile.record(run.compile_key, run.report, run.report.steps)

    def of_calls(self, setup: DenoiserSetup) -> CallFeature:
        return _CompiledBlocks(setup)


class _CompiledBlocks(CallFeature):
    """A denoiser's compiled blocks. After each call it updates the report's backend: 'auto' may fall back to another
    while it compiles."""

    def __init__(self, setup: DenoiserSetup):
        self._stage = stage = setup.stage
        handle, dtype = stage.handle, stage.plan.dtype
        self._backend = for_dtype(handle.backend, handle.architecture, dtype)
        self._options = handle.compile_options
        self._compiled: torch.nn.Module | None = None  # of the latest attempt
        self._scaled = False  # the latest attempt has overflow protection
        self._tell()

    def build_options(self) -> dict[str, Any]:
        if self._backend.name == EAGER:
            return {}
        stage, self._compiled = self._stage, None  # drops an earlier attempt's
        kept = stage.handle.store.scales if stage.handle.ranks.alone else {}  # so that all ranks begin alike
        known = kept.setdefault((stage.name, keys(stage.loras)), KnownPeaks())
        return {"compiled": self._in_blocks, "blocks": stage.blocks, "known": known}

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        self._scaled = made.all_layers_scaled
        self._tell()
        return made

    def wrap_guarded(self, call: Callable[..., Any], *, rerun: bool) -> Callable[..., Any]:
        if rerun or self._backend.name != EAGER or not self._options.attention:  # compiled blocks contain it
            return call
        return Attended(call, self._options.attention)

    def end_call(self, record: StepRecord) -> None:
        del record
        self._tell()

    def _in_blocks(self, half: torch.nn.Module, what: Hashable, inside: Callable[[Any], Any] | None) -> torch.nn.Module:
        if inside and self._backend.name == "oneflow":
            self._backend = BackendChoice(EAGER, "oneflow does not compile layers with overflow protection")
        stage = self._stage
        handle, plan = stage.handle, stage.plan
        known = handle.store.compiled
        how = (self._backend.asked_for, self._options, plan.numerics, plan.accumulation, "planned" if inside else what)
        key = (stage.name, keys(stage.loras), *how)
        alone = stage.shared_by == 1  # else a kept copy splits tokens as an earlier run did
        kept = known.get(key) if alone else None
        if kept is None or kept.__dict__["made_of"] != what or (inside and not handle.ranks.alone):
            device = handle.store.placement.device
            kept = compiled(half, handle.family.blocks, self._backend, self._options, inside, device=device)
            kept.__dict__["made_of"] = what
            if alone:
                known[key] = kept
        self._compiled = kept
        return self._compiled

    def _tell(self) -> None:
        report = self._stage.report
        if self._scaled and self._compiled is None and self._backend.name != EAGER:
            first = "the first step" if self._stage.plan.dtype == "fp16" else "what is in bf16"
            report.backend, report.backend_reason = EAGER, f"{first} with overflow protection is not compiled"
            return
        backend = came_to(self._compiled, self._backend) if self._compiled else self._backend
        said = [backend.reason, self._options.in_words(backend.name)]
        report.backend, report.backend_reason = backend.name, "; ".join(filter(None, said))


@contextmanager
def while_compiling(handle: PipelineHandle, report: RunReport, tell: Tell) -> Generator[None]:
    """Provide the compile cache and the progress messages while a network runs, and count in its report the graphs that
    were compiled or found in the cache. Does nothing for 'eager'."""
    if handle.backend.name == EAGER:
        yield
        return
    from .cache import compile_cache, target_of

    graphs, from_cache = graphs_compiled(), graphs_from_cache()
    try:
        with ExitStack() as held:
            if handle.backend.name == "inductor":
                target = target_of(handle, report.plan, handle.compile_options)
                held.enter_context(compile_cache(handle.compiled, target, report, tell))
            held.enter_context(listening(tell, report.note))
            yield
    finally:
        report.graphs = None if report.backend in (EAGER, "oneflow") else graphs_compiled() - graphs
        report.graphs_kept = min(graphs_from_cache() - from_cache, report.graphs or 0)
