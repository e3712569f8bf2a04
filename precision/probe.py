"""The numerics probe: peaks of all layers of a module in fp32, and the dtype and protection that they call for.

fp32 does not overflow itself, so it shows how far beyond fp16's range a layer would go.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from ..trust.plain import for_json
from .after_failure import is_relevant
from .arch import Architecture
from .dtypes import DTYPES, HALF_DTYPES
from .layer_peaks import hooked, largest, leaves
from .overrides import (
    NOTHING,
    RANGE,
    Peak,
    PrecisionOverrides,
    Profile,
    diagnose_from_fp32_peaks,
    order,
    relevant_peak,
)
from .policy import Plan
from .scaled_products import error_relative_to_bf16

WORST = 10  # number of layers to name

Result = TypeVar("Result")


@dataclass(frozen=True)
class ProbedLayer:
    """A layer or block in the step of its largest peak."""

    name: str
    reach: float  # max |x|
    step: int  # counted from 0
    is_block: bool  # the peak is a block's output

    @property
    def label(self) -> str:
        return f"output of {self.name}" if self.is_block else self.name


@dataclass(frozen=True)
class Probed:
    """The measurements of a probe."""

    blocks: tuple[str, ...]
    steps: tuple[Mapping[str, Peak], ...]  # name of a layer or block → peak, in the order in which they ran
    # Layers whose scaled fp16 product has a larger error than bf16's, since small values next to large ones underflow →
    # the ratio of the errors, the largest first.
    too_far_apart: Mapping[str, float] = field(default_factory=dict)

    def reach(self, name: str, peak: Peak) -> float:
        """Return the max |x| that counts for a layer or block."""
        return relevant_peak(name, peak, self.blocks)

    def peaks(self) -> dict[str, Peak]:
        """Return the peaks of layers and blocks over all steps."""
        peaks: dict[str, Peak] = {}
        for step in self.steps:
            for name, peak in step.items():
                peaks[name] = peaks.get(name, peak).widened(peak)
        return peaks

    def entries(self) -> list[ProbedLayer]:
        """Return every layer and block in the step of its largest peak, the largest first."""
        found: dict[str, ProbedLayer] = {}
        for index, step in enumerate(self.steps):
            for name, peak in step.items():
                entry = ProbedLayer(name, self.reach(name, peak), index, name in self.blocks)
                found[name] = max(found.get(name, entry), entry, key=lambda each: order(each.reach))
        return sorted(found.values(), key=lambda entry: -order(entry.reach))

    def worst(self) -> list[ProbedLayer]:
        """Return the first of `entries`, each value once: blocks and layers share inputs and outputs."""
        found: dict[object, ProbedLayer] = {}
        for entry in self.entries():
            found.setdefault("blocks" if entry.is_block else (entry.reach, entry.step), entry)
        return [*found.values()][:WORST]


class Probe:
    """Records peaks of a module's layers and blocks, by hooks that exist during each call.

    Copies of the module may run at the same time, each in its own thread.
    """

    def __init__(self, module: torch.nn.Module, blocks: Sequence[str]):
        half = any(parameter.dtype in HALF_DTYPES for parameter in module.parameters())
        # In a module that has no weights in half precision each layer counts, in fp32 or not.
        counted = is_relevant if half else lambda layer: not isinstance(layer, torch.nn.Dropout)
        layers = {name: layer for name, layer in leaves(module).items() if counted(layer)}
        self._modules = layers | {name: module.get_submodule(name) for name in blocks}
        self._blocks = tuple(blocks)
        self._apart: dict[str, float] = {}
        self._steps: list[dict[str, Peak]] = [{}]  # the last one is the current step
        self._lock = threading.Lock()

    def watch(self, call: Callable[[], Result], twin: torch.nn.Module | None = None) -> Result:
        """Run a call of the module, or of a copy, in fp32, and return its result."""
        modules = {name: twin.get_submodule(name) for name in self._modules} if twin else self._modules
        seen: list[tuple[str, torch.Tensor]] = []

        def see(name: str, layer: torch.nn.Module, given: Any, made: Any) -> None:
            output = largest(made)
            apart = error_relative_to_bf16(layer, given[0] if given else None)
            seen.append((name, torch.stack([each.to(output.device) for each in (largest(given), output, apart)])))

        with hooked(modules, see):
            result = call()
        if seen:
            device = seen[0][1].device
            numbers = torch.stack([each.to(device) for _, each in seen]).tolist()
            with self._lock:
                for (name, _), (given, made, apart) in zip(seen, numbers, strict=True):
                    kept, peak = self._steps[-1], Peak(given, made)
                    kept[name] = kept.get(name, peak).widened(peak)
                    self._apart[name] = max(self._apart.get(name, 0.0), apart)
        return result

    def end_step(self) -> None:
        """End a step: the peaks since the step before belong to it."""
        self._steps.append({})

    @property
    def probed(self) -> Probed:
        apart = sorted(((name, share) for name, share in self._apart.items() if share > 1), key=lambda each: -each[1])
        return Probed(self._blocks, tuple(self._steps[:-1]), dict(apart))


@dataclass(frozen=True)
class Verdict:
    """Whether a dtype can hold the measured peaks, and how."""

    dtype: str
    learned: PrecisionOverrides  # the overrides with which no step fails
    reason: str

    @property
    def fits(self) -> bool:
        return not self.learned.whole_run_fp32

    @property
    def plan(self) -> str:
        """How a run in this dtype would compute, in a few words."""
        if not self.fits:
            return f"{self.dtype} is not enough"
        if how := self.learned.in_words():
            return f"{self.dtype} with {' + '.join(how)}"
        return "fp16 plain" if self.dtype == "fp16" else self.dtype


@dataclass(frozen=True)
class ProbeResult:
    """The measurements, and the recommendation."""

    model: str
    architecture: Architecture
    plan: Plan  # the present one
    sampled: str  # for people: "64×64, 9 frames, seed 0"
    probed: Probed
    seconds: float  # of the run
    chosen: Verdict
    to_apply: str  # how to apply the recommendation; "" if there is nothing to do
    profile: Profile | None = None  # None if there is nothing to learn

    @property
    def profile_text(self) -> str:
        return self.profile.text() if self.profile else ""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One for each dtype."""
        return tuple(judge(self.probed, dtype) for dtype in DTYPES)

    @property
    def headline(self) -> str:
        return f"Recommended on {self.architecture}: {self.chosen.plan}"

    @property
    def reason(self) -> str:
        if self.chosen.dtype == self.plan.dtype:
            return f"{self.plan.reason}; {self.chosen.reason}"
        return f"{self.plan.dtype} is not enough: {judge(self.probed, self.plan.dtype).reason}"

    @property
    def cost(self) -> str:
        steps = len(self.probed.steps)
        return f"{steps} step{'' if steps == 1 else 's'} in {self.seconds:.3g} s; runs without the probe are not slower"

    def text(self) -> str:
        """For people."""
        lines = [
            self.headline,
            f"    Why: {self.reason}",
            f"    {f'To apply it: {self.to_apply}.' if self.to_apply else 'Nothing has to be set for it.'}",
            "Each precision:",
            *(f"    {verdict.plan}: {verdict.reason}" for verdict in self.verdicts),
            f"The largest of {len(self.probed.entries())} layers and blocks:",
            *(f"    {entry.reach:.3g} in {entry.label}, step {entry.step + 1}" for entry in self.probed.worst()),
        ]
        if apart := self.probed.too_far_apart:
            named = ", ".join(f"'{name}' {share:.3g} × as far off" for name, share in [*apart.items()][:WORST])
            layers, their = ("1 layer", "its") if len(apart) == 1 else (f"{len(apart)} layers", "their")
            lines.append(
                f"In {layers} fp16 loses more digits than bf16, since {their} inputs vary too much in size: {named}"
            )
        return "\n".join([*lines, f"Cost: {self.cost}"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        verdicts = [asdict(verdict) | {"plan": verdict.plan, "fits": verdict.fits} for verdict in self.verdicts]
        return for_json(
            {
                "model": self.model,
                "architecture": self.architecture.name,
                "dtype": self.chosen.dtype,
                "plan": self.chosen.plan,
                "learned": asdict(self.chosen.learned),
                "reason": self.reason,
                "verdicts": verdicts,
                "worst": [asdict(entry) | {"step": entry.step + 1} for entry in self.probed.worst()],
                "too_far_apart": self.probed.too_far_apart,
                "measured_steps": len(self.probed.steps),
                "seconds": self.seconds,
                "profile": self.profile_text,
            }
        )


def judge(probed: Probed, dtype: str) -> Verdict:
    """Judge whether a dtype can hold the measured peaks, and what it needs for it."""
    peaks = probed.peaks()
    finding = diagnose_from_fp32_peaks(peaks, probed.blocks, dtype)
    learned = NOTHING
    if finding:  # values beyond fp16 can be scaled, values beyond bf16 cannot
        scaled = dtype == "fp16" and all(math.isfinite(probed.reach(name, peak)) for name, peak in peaks.items())
        learned = PrecisionOverrides(all_layers_scaled=scaled, whole_run_fp32=not scaled)
    for name, share in probed.too_far_apart.items() if dtype == "fp16" else ():
        if learned.all_layers_scaled:
            said = f"the inputs of '{name}' vary too much in size: its fp16 product is {share:.3g} ×"
            return Verdict(dtype, PrecisionOverrides(whole_run_fp32=True), f"{said} as far off as bf16's")
    if finding:
        return Verdict(dtype, learned, finding.reason)
    most = "".join(f"the most is {entry.reach:.3g}, in '{entry.name}'; " for entry in probed.entries()[:1])
    return Verdict(dtype, learned, f"{most}{dtype} ends at {RANGE[dtype]:.5g}")


def recommend(probed: Probed, dtype: str, *, native_bf16: bool) -> Verdict:
    """Return the first verdict that fits, of: the plan's dtype, bf16 where the card computes it natively, the plan's
    dtype with every layer scaled, fp32."""
    candidates = dict.fromkeys((dtype, *(("bf16",) if native_bf16 else ()), "fp32"))
    fitting = [verdict for verdict in (judge(probed, candidate) for candidate in candidates) if verdict.fits]
    half = (verdict for verdict in fitting if verdict.dtype in (dtype, "bf16"))
    cheap = (verdict for verdict in half if not verdict.learned.all_layers_scaled)
    return next(cheap, fitting[0] if fitting else judge(probed, "fp32"))
