"""The interface of a run's features, and the small features. `features_of` in `denoiser.py` chooses the features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...precision.after_failure import HalfPrecisionForward
from ...precision.overflow_detection import ClipDetector
from ...precision.overrides import MAX_FP16_ERROR, fp16_accumulation_in_words
from ...precision.policy import Plan
from ...precision.report import RunReport, StepRecord
from ...precision.shallow_copy import with_forward
from ..compile.backends import EAGER, for_dtype
from ..families.spec import ROTARY

if TYPE_CHECKING:
    from ...precision.overflow_detection import PendingReads
    from .handle import PipelineHandle
    from .previews import Previews
    from .sample import SampleSettings
    from .stage import ComponentStage

Tell = Callable[[str], None]
APART = "CFG halves in turn"  # `SplitBatch`'s name for its saving


@dataclass(frozen=True)
class RunContext:
    """What features are made for."""

    handle: PipelineHandle
    plan: Plan  # of the denoiser
    report: RunReport  # of the denoiser
    settings: SampleSettings | None = None  # None where single calls are made, outside of a sampling run
    prompts: tuple[torch.Tensor, ...] = ()  # embeddings of both calls of a step, where guidance takes two; else none
    guided: bool = False  # a step is computed with the prompt and without
    previews: Previews | None = None
    tell: Tell = lambda _: None
    compile_key: str = ""  # what eager seconds are counted by; "": they are not


@dataclass(frozen=True)
class DenoiserSetup:
    """How a denoiser is set up: once in a run, and again when memory runs out."""

    stage: ComponentStage
    inputs: Mapping[str, Any]  # arguments, by name, of the next guarded call
    savings: tuple[str, ...] = ()  # what features were asked to do to take less memory, as `Feature.saving` names it

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The arguments of each call of the network that the guarded call makes."""
        return split_cfg_batch(self.inputs) if APART in self.savings else [self.inputs]


class CallFeature:
    """A feature of one denoiser's calls, inside the guard. Methods change nothing unless a feature says otherwise."""

    def build_options(self) -> dict[str, Any]:
        """Return options of `build_half_precision_forward`."""
        return {}

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        """Wrap the attempt: each call in half precision."""
        return made

    def wrap_rerun(self, rerun: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the rerun: each call in fp32."""
        return rerun

    def wrap_guarded(self, call: Callable[..., Any], *, rerun: bool) -> Callable[..., Any]:
        """Wrap all calls of one attempt or rerun: one, or one for each half of a batch."""
        del rerun
        return call

    def begin_call(self) -> None: ...

    def end_call(self, record: StepRecord) -> None: ...

    def peak_inside(self) -> torch.Tensor | None:
        """Return the largest |x| inside the latest attempt, for stages that clip; None if nothing is watched."""


class Feature:
    """A feature of one run. Methods change nothing unless a feature says otherwise."""

    pending: PendingReads | None = None  # numbers that the guard reads with each call's own

    def prepare(self, stage: ComponentStage) -> ComponentStage:
        """Return a denoiser's stage with changes of this feature."""
        return stage

    def around_run(self) -> AbstractContextManager[object]:
        """Return a context for the run, entered before diffusers' pipeline is made."""
        return nullcontext()

    def wrap_pipeline(self, pipe: Any) -> None:
        """Change diffusers' pipeline, which only this run uses."""

    def wrap_denoiser(self, stage: ComponentStage, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the guarded calls of a denoiser."""
        del stage
        return call

    def saving(self, stage: ComponentStage, inputs: Mapping[str, Any]) -> str:
        """Return how the feature can take less memory in calls with such inputs, for the report; "": it cannot."""
        del stage, inputs
        return ""

    def reset(self, denoiser: str) -> None:
        """Drop the state of a denoiser's calls, before it is placed and set up again. denoiser: its name."""

    def of_calls(self, setup: DenoiserSetup) -> CallFeature | None:
        """Return the feature's part inside the guard; None: nothing."""

    def on_meta(self, setup: DenoiserSetup) -> CallFeature | None:
        """Return a stand-in for `of_calls` that takes as much memory on "meta"; None: next to nothing."""

    def on_step_end(self, latents: torch.Tensor) -> None: ...


def options_of(features: Iterable[CallFeature]) -> dict[str, Any]:
    """Return the features' options of `build_half_precision_forward`."""
    return {name: value for feature in features for name, value in feature.build_options().items()}


def wrapped(made: HalfPrecisionForward, features: Iterable[CallFeature]) -> HalfPrecisionForward:
    """Return the attempt, wrapped by all features."""
    for feature in features:
        made = feature.wrap_attempt(made)
    return made


def split_cfg_batch(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return both halves of a call's arguments; if the batch is odd, one item with all of them.

    inputs: the first tensor with two or more dimensions has the batch first. Tensors whose first dimension is as long
    are split too, except rotary tables.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(dict(inputs)) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
    batch = len(leaves[0]) if leaves else 1
    if batch % 2:
        return [dict(inputs)]

    def half(number: int) -> dict[str, Any]:
        def part(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.chunk(2)[number] if leaf.ndim and len(leaf) == batch else leaf

        return {
            name: value if name == ROTARY else pytree.tree_map_only(torch.Tensor, part, value)
            for name, value in inputs.items()
        }

    return [half(0), half(1)]


def joined(made: Sequence[Any]) -> Any:
    """Return a call's output for the whole batch, from its outputs for parts of the batch."""

    def cat(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]

    return pytree.tree_map(cat, *made)


class Fp16Accumulation(Feature):
    """Has products accumulate in fp16, after a step has shown that the error is small, if the backend supports it."""

    def of_calls(self, setup: DenoiserSetup) -> CallFeature | None:
        stage, handle = setup.stage, setup.stage.handle
        where = f"fp16 accumulation in the {stage.name}"
        backend = for_dtype(handle.backend, handle.architecture, stage.plan.dtype).name
        if backend not in (EAGER, "inductor"):
            stage.report.note(f"{where}: no effect, since {backend} multiplies in its own way", instead_of=where)
            return None
        return _Fp16Accumulation(stage.report, where)


class _Fp16Accumulation(CallFeature):
    def __init__(self, report: RunReport, where: str):
        self._report, self._where = report, where

    def build_options(self) -> dict[str, Any]:
        return {"fp16_sums": True}

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        error = made.overrides.fp16_error
        if error is not None:
            said = fp16_accumulation_in_words(error)
            self._report.note(f"{self._where}: {said}", instead_of=self._where)
        right = error is not None and error <= MAX_FP16_ERROR
        return replace(made, fp16_accumulation=right)


class ClippedValues(Feature):
    """Watches values that a network clips in fp16: they are finite, but wrong. T5 clamps at ±64504, CogView3-Plus its
    residual stream at ±65504."""

    def of_calls(self, setup: DenoiserSetup) -> CallFeature:
        return _ClippedValues(setup.stage.plan.dtype, together=not setup.stage.handle.ranks.alone)


class _ClippedValues(CallFeature):
    """together: several processes compute the network, and each has to return a number."""

    def __init__(self, dtype: str, *, together: bool = False):
        self._clips, self._together, self._watches = ClipDetector(dtype), together, True

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        self._watches = not made.all_layers_scaled
        return replace(made, run=self._clips.wrap(made.run)) if self._watches else made

    def peak_inside(self) -> torch.Tensor | None:
        if not self._watches:  # not in the latest attempt; all processes agree
            return None
        return self._clips.peak if self._together else self._clips.take()


class SplitBatch(Feature):
    """Computes the CFG halves sequentially if memory is short. Not in parallel runs, whose ranks have to make the same
    calls."""

    def saving(self, stage: ComponentStage, inputs: Mapping[str, Any]) -> str:
        return APART if stage.handle.ranks.alone and len(split_cfg_batch(inputs)) > 1 else ""

    def of_calls(self, setup: DenoiserSetup) -> CallFeature | None:
        return _HalfByHalf() if APART in setup.savings else None


class _HalfByHalf(CallFeature):
    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        return replace(made, run=_half_by_half(made.run), eager=_half_by_half(made.eager))

    def wrap_rerun(self, rerun: Callable[..., Any]) -> Callable[..., Any]:
        return _half_by_half(rerun)


def _half_by_half(call: Callable[..., Any]) -> Callable[..., Any]:
    def apart(**inputs: Any) -> Any:
        return joined([call(**part) for part in split_cfg_batch(inputs)])

    return with_forward(call, apart) if isinstance(call, torch.nn.Module) else apart
