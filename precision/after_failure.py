"""How a run adapts to failing calls: overflow protection (every layer scaled) from the next call on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .accumulation import fp16_accumulation
from .dtypes import DTYPES, FP16_MAX
from .layer_peaks import Agree, alone, difference, first_broken, floating, leaf_peaks
from .learned_scales import LearnedProducts
from .overflow_detection import propagate_nonfinite_attention
from .overrides import (
    MAX_FP16_ERROR,
    NOTHING,
    STAY,
    OverflowDiagnosis,
    Peak,
    PrecisionOverrides,
    diagnose_from_fp32_peaks,
    diagnose_from_half_run,
    escalate_overrides,
)
from .quantised import QuantisedLinears

if TYPE_CHECKING:
    from .planned_layers import KnownPeaks
    from .planned_products import Scale

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class HalfPrecisionForward:
    """The callable of a stage in half precision."""

    run: Any  # a module, or another callable
    eager: Any  # the same, not compiled, so that hooks on its layers work
    all_layers_scaled: bool = False  # overflow protection: scaled products, all else in float32
    quantised: tuple[str, ...] = ()  # names of its quantised layers
    measure: Callable[[Callable[[], Any]], None] | None = None  # finds which layers may be quantised, by a call
    fp16_accumulation: bool | None = None  # PyTorch's switch during the call; None: unchanged
    overrides: PrecisionOverrides = NOTHING  # that it was built with
    renew: Callable[[], bool] = lambda: False  # after a failing call: drops learned scales; whether it used any
    slower: Callable[[], str] = lambda: ""  # why scaling is slower than it could be, in words


Compiled = Callable[[torch.nn.Module, Any, Callable[[Any], Any] | None], torch.nn.Module]


def build_half_precision_forward(
    module: torch.nn.Module,
    learned: PrecisionOverrides,
    dtype: str,
    *,
    all_layers_scaled: bool = False,
    quantised: QuantisedLinears | None = None,
    compiled: Compiled | None = None,
    blocks: Sequence[str] = (),
    known: KnownPeaks | None = None,
    fp16_sums: bool = False,
    onloaded: Callable[[torch.nn.Module, torch.nn.Module], torch.nn.Module] = lambda shell, _eager: shell,
    device: torch.device | None = None,
    tf32: bool = False,
    agree: Agree = alone,
) -> HalfPrecisionForward:
    """Build the attempt that the plan and the overrides ask for: every layer scaled, or the module as it is, quantised
    and compiled.

    all_layers_scaled: the plan asks for it, whatever was learned.
    quantised: the module's quantised layers, if the plan asks for them. Until their errors are measured, `eager`
        computes in half precision and measures them, and nothing is compiled.
    compiled: makes a shallow copy with compiled blocks, given the module, a key that distinguishes it from others with
        the same weights, and a wrapper for each block before it is compiled, or None.
    blocks: the names of these blocks.
    known: peaks of earlier runs, for layers that are scaled and compiled; extended by this run.
    fp16_sums: products may accumulate in fp16.
    onloaded: wraps a shallow copy so that its weights are brought to the device, given that and its eager original.
    device: the device that computes, if the weights are elsewhere between calls.
    agree: all-reduces peaks over the processes that compute the module together.
    """
    if all_layers_scaled or learned.all_layers_scaled:
        accumulates = fp16_sums and (learned.fp16_error is None or learned.fp16_error <= MAX_FP16_ERROR)
        how: dict[str, Any] = {"float32_products": not accumulates}  # no kernel does both
        layered = None
        if dtype == "fp16" and compiled and blocks:
            from .planned_layers import InPlannedBlock, KnownPeaks, LayeredNetwork, with_planned_layers

            def planned(plan: dict[str, Scale], safe_attention: bool) -> torch.nn.Module:
                shell, key = with_planned_layers(module, plan, device), (*sorted(plan.items()), safe_attention)
                return compiled(shell, key, partial(InPlannedBlock, safe_attention=safe_attention))

            layered = LayeredNetwork(module, blocks, planned, known or KnownPeaks(), device, **how)
        products, whole = LearnedProducts(DTYPES[dtype], agree, layered, **how), onloaded(module, module)
        run = partial(products.run, onloaded(layered.shell, module) if layered else whole, tf32=tf32)
        eager = partial(products.run_by_rows, whole, tf32=tf32)
        return HalfPrecisionForward(
            run, eager, all_layers_scaled=True, overrides=learned, renew=products.renew, slower=lambda: products.slower
        )
    left = tuple(dict.fromkeys((*learned.unquantised, *quantised.left))) if quantised else ()
    names = tuple(name for name in quantised.names if name not in left) if quantised else ()
    fewer = quantised.shell(module, left) if quantised and names else module
    watched, measure = quantised.measuring(module) if quantised and names and not quantised.errors else (fewer, None)
    shell = compiled(fewer, left, None) if compiled and not measure else fewer
    eager = onloaded(watched, module)
    run = eager if shell is watched else onloaded(shell, module)
    return HalfPrecisionForward(run, eager, quantised=names, measure=measure, overrides=learned)


@dataclass(eq=False)
class FallbackAdapter:
    """A stage's attempt in half precision, rebuilt after each failure with the new overrides."""

    module: torch.nn.Module  # the unchanged original, which the rerun calls
    dtype: str
    build: Callable[[PrecisionOverrides], HalfPrecisionForward]  # builds the attempt
    blocks: Sequence[str] = ()  # names of its blocks
    learned: PrecisionOverrides = NOTHING  # by earlier runs, and by this one
    agree: Agree = alone  # all-reduces measurements over the processes that compute the stage together

    def __post_init__(self) -> None:
        self.attempt = self.build(self.learned)
        self._peaks: dict[str, Peak] = {}
        self._proven = NOTHING  # the overrides of the last successful call

    def watch(self, rerun: Callable[[], Result]) -> tuple[Result, OverflowDiagnosis | None]:
        """Run the fp32 rerun and record peaks. Returns its result, and a diagnosis if a peak exceeds the dtype's
        range."""
        results: list[Result] = []
        peaks = leaf_peaks(self.module, lambda: results.append(rerun()), self.blocks, self.agree)
        self._peaks = {name: peak for name, peak in peaks.items() if is_relevant(self.module.get_submodule(name))}
        if self.attempt.all_layers_scaled:  # large peaks are no reason: its layers scale them
            return results[0], None
        return results[0], diagnose_from_fp32_peaks(self._peaks, self.blocks, self.dtype)

    def locate(
        self,
        *args: Any,
        saturated: bool = False,
        peak_inside: Callable[[], torch.Tensor | None] = lambda: None,
        **kwargs: Any,
    ) -> OverflowDiagnosis:
        """Find the module that fails in half precision although no peak exceeds the dtype's range in fp32, by repeating
        the half-precision call uncompiled.

        saturated: the output is finite, but at fp16's largest value.
        peak_inside: returns the largest |x| that the call clipped. It fails outside of all modules, in another pack's
            patch for example, if no output of a module shows it.
        """
        eager = self.attempt.eager
        module = eager if isinstance(eager, torch.nn.Module) else self.module
        limit = FP16_MAX if saturated else torch.inf
        with propagate_nonfinite_attention((args, kwargs)), fp16_accumulation(self.attempt.fp16_accumulation):
            name = first_broken(module, lambda: eager(*args, **kwargs), limit, self.agree)
        clipped = peak_inside()
        if name is None and clipped is not None and not float(self.agree(clipped.reshape(1))) < limit:
            name = ""
        return diagnose_from_half_run(
            name,
            self._peaks,
            self.dtype,
            self.attempt.quantised,
            all_layers_scaled=self.attempt.all_layers_scaled,
            fp16_accumulation=bool(self.attempt.fp16_accumulation),
        )

    def learn(self, finding: OverflowDiagnosis) -> str:
        """Rebuild the attempt for a diagnosis. Returns the change in words; "" if there is none."""
        scaled = self.learned.all_layers_scaled or self.attempt.all_layers_scaled
        known = replace(self.learned, all_layers_scaled=scaled)
        learned, action = escalate_overrides(known, finding)
        if learned == known:
            return ""
        logger.info("%s: %s", finding.reason, action)
        if learned.whole_run_fp32:
            return self.stay()
        self.attempt = self.build(learned)
        self.learned = learned
        return action

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Measure before the first call which layers may be quantised, by a call with the same arguments."""
        assert self.attempt.measure
        self.attempt.measure(lambda: self.attempt.eager(*args, **kwargs))
        self.attempt = self.build(self.learned)

    def on_success(self) -> None:
        """Note that a call of the attempt succeeded, so its overrides help."""
        self._proven = self.learned

    @property
    def checks_fp16_accumulation(self) -> bool:
        """Whether fp16 accumulation is requested and not yet checked."""
        return self.attempt.fp16_accumulation is False and self.learned.fp16_error is None

    def check_fp16_accumulation(self, *args: Any, **kwargs: Any) -> None:
        """Run a call uncompiled without and with fp16 accumulation, and rebuild the attempt by the difference. Does
        nothing if another stage of this process turned the switch off meanwhile.

        args, kwargs: of a call that succeeded.
        """
        with fp16_accumulation(False):
            without = floating(self.attempt.eager(*args, **kwargs))
        with fp16_accumulation(True):
            made = floating(self.attempt.eager(*args, **kwargs))
            on = torch.backends.cuda.matmul.allow_fp16_accumulation
        error = difference(made, without) + (0 if on else math.nan)
        found = float(self.agree(error.reshape(1)))
        if not math.isnan(found):
            self.learned = replace(self.learned, fp16_error=min(found, 1.0))
            self.attempt = self.build(self.learned)

    def stay(self) -> str:
        """Switch the rest of the run to fp32, and return that in words. Overrides that never gave a finite step are
        discarded: later runs would pay for them in vain."""
        known = self.learned
        self.learned = replace(self._proven, whole_run_fp32=True, fp16_error=known.fp16_error)
        return STAY


def is_relevant(layer: torch.nn.Module) -> bool:
    """Return whether a layer's peaks count. They do not if it is a dropout, or if it computes in fp32 in half-precision
    calls too, like T5's `wo`. A layer of ComfyUI's with fp32 weights may cast them to its input's dtype."""
    weights = list(layer.parameters(recurse=False))
    casts = getattr(layer, "comfy_cast_weights", False)
    in_fp32 = bool(weights) and not casts and all(weight.dtype is torch.float32 for weight in weights)
    return not (in_fp32 or isinstance(layer, torch.nn.Dropout))
