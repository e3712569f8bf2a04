"""A denoiser's quantised layers: made once, filled at a run's first step, and emptied at its end.

Quantised weights last no longer than a run. They are made from the half-precision weights on the device, about as fast
as these can be read. ComfyUI's memory manager does not know of them, so none are left after a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...precision.activation_estimate import on_meta
from ...precision.after_failure import HalfPrecisionForward
from ...precision.policy import Plan, PlanImpossible
from ...precision.quantised import LEAST, QuantisedLinears, lacking
from ...precision.report import RunReport
from ..models.lora import keys
from ..run.feature import CallFeature, DenoiserSetup, Feature
from .offload import Offload, brings_parts_to

if TYPE_CHECKING:
    import torch

    from ..run.stage import ComponentStage


class QuantisedRun(Feature):
    def __init__(self) -> None:
        self._layers: dict[str, QuantisedLinears] = {}  # by denoiser

    def reset(self, denoiser: str) -> None:
        if layers := self._layers.pop(denoiser, None):
            layers.empty()

    def of_calls(self, setup: DenoiserSetup) -> CallFeature | None:
        layers = quantised_of(setup.stage)
        if layers:
            self._layers[setup.stage.name] = layers
        return _QuantisedLayers(layers, setup.stage.report) if layers else None

    def on_meta(self, setup: DenoiserSetup) -> CallFeature | None:
        quantised = setup.stage.plan.quantised
        return _LayersOnMeta(setup.stage) if quantised and not lacking(quantised) else None


class _QuantisedLayers(CallFeature):
    def __init__(self, layers: QuantisedLinears, report: RunReport):
        self._layers, self._report = layers, report
        self._used = True

    def build_options(self) -> dict[str, Any]:
        return {"quantised": self._layers}

    def wrap_attempt(self, made: HalfPrecisionForward) -> HalfPrecisionForward:
        self._used = not made.all_layers_scaled
        if not self._used:
            self._layers.empty()
            self._report.note("not quantised: overflow protection is on")
        elif said := self._layers.in_words():
            self._report.note(said)
        return made

    def begin_call(self) -> None:
        if self._used:
            self._layers.fill()
            self._layers.start()

    def peak_inside(self) -> torch.Tensor | None:
        return self._layers.take()


class _LayersOnMeta(CallFeature):
    """Quantised layers on "meta". fp8 counts as int8, whose product takes more: torchao makes fp8 only on a card."""

    def __init__(self, stage: ComponentStage):
        self._stage = stage

    def build_options(self) -> dict[str, Any]:
        layers = QuantisedLinears(on_meta(self._stage.module), self._stage.blocks, "int8")
        layers.fill()
        return {"quantised": layers}


def check(plan: Plan, offload: Offload, device: torch.device) -> None:
    """Raise PlanImpossible if a quantised plan's layers cannot be quantised here: without torchao, or if the
    half-precision weights are never on the device together."""
    if missing := lacking(plan.quantised):
        raise PlanImpossible(missing)
    if offload.in_parts and brings_parts_to(device):
        raise PlanImpossible(
            "Precision '{}' keeps quantised and half-precision weights on the card, but offload '{}' keeps neither "
            "there. Choose offload 'auto', 'none' or 'model', or precision 'bf16'.",
            plan.quantised,
            offload.value,
        )


def quantised_of(stage: ComponentStage) -> QuantisedLinears | None:
    """Return the quantised layers of a stage's denoiser, without weights yet; None if its plan has none."""
    if not stage.plan.quantised:
        return None
    known = stage.handle.store.quantised
    key = (stage.name, keys(stage.loras), stage.plan.quantised)
    if key not in known:
        known[key] = QuantisedLinears(stage.module, stage.blocks, stage.plan.quantised, stage.agree)
    if not known[key].names:
        stage.report.note(f"nothing is quantised: no linear layer of its blocks has {LEAST} or more features")
    return known[key]


def quantised_bytes(stage: ComponentStage) -> int:
    """Return the bytes of a stage's quantised weights on its device, besides the half-precision ones."""
    layers = quantised_of(stage)
    return layers.n_bytes if layers else 0
