"""What every layer of a module reaches while it computes in fp32, and what follows: dtype, wide stream, wide parts.

In fp32 the measurement cannot overflow itself: it shows how far beyond fp16's range a layer would go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from ..trust.plain import for_json
from .arch import Architecture
from .dtypes import DTYPES
from .fallback import counts
from .half_products import error_beside_bf16
from .observe import hooked, largest, leaves
from .overrides import (
    NOTHING,
    RANGE,
    ModuleStructure,
    Peak,
    PrecisionOverrides,
    adapted,
    covered,
    diagnose_from_fp32_peaks,
    escalate_overrides,
    order,
)
from .policy import Plan
from .profile_store import Profile
from .upcast import HALF_DTYPES

WORST = 10  # layers that are named

Result = TypeVar("Result")


@dataclass(frozen=True)
class Values:
    """What a layer or block reached in one step."""

    peak: Peak
    apart: float = 0.0  # the error of its scaled product in fp16, as a share of bf16's; 0 where it multiplies nothing

    def widened(self, other: Values) -> Values:
        return Values(self.peak.widened(other.peak), max(self.apart, other.apart))


@dataclass(frozen=True)
class Entry:
    """A layer or block in the step in which it reached most."""

    name: str
    reach: float  # max |x|
    step: int  # counted from 0


@dataclass(frozen=True)
class Probed:
    """What a probe measured."""

    anatomy: ModuleStructure
    steps: tuple[Mapping[str, Values], ...]  # by layer and block, in the order in which they ran
    groups: Mapping[str, Peak] = field(default_factory=dict)  # over all steps, of the anatomy's groups

    def reach(self, name: str, values: Values) -> float:
        """Return max |x| that counts for a layer or block: what a block puts out, or what a layer reaches apart from
        the residual stream, which shows in the blocks."""
        if name in self.anatomy.blocks:
            return values.peak.output
        return self.anatomy.inner(name, values.peak)

    def peaks(self) -> dict[str, Peak]:
        """Return the peaks over all steps of what a diagnosis looks at: layers and groups, and blocks where there is no
        stream."""
        peaks = dict(self.groups)
        for step in self.steps:
            for name, values in step.items():
                if not (self.anatomy.stream and name in self.anatomy.blocks):
                    peaks[name] = peaks.get(name, values.peak).widened(values.peak)
        return peaks

    def entries(self) -> list[Entry]:
        """Return every layer and block in the step in which it reached most, the largest first."""
        found: dict[str, Entry] = {}
        for index, step in enumerate(self.steps):
            for name, values in step.items():
                reach = self.reach(name, values)
                if name not in found or order(reach) > order(found[name].reach):
                    found[name] = Entry(name, reach, index)
        return sorted(found.values(), key=lambda entry: -order(entry.reach))

    def worst(self, number: int = 10) -> list[Entry]:
        """Return the first `number` of `entries`. The residual stream, which runs through all blocks, and a value that
        several layers are given or hand on stand there once."""
        found: dict[object, Entry] = {}
        for entry in self.entries():
            in_stream = self.anatomy.stream is not None and entry.name in self.anatomy.blocks
            found.setdefault("stream" if in_stream else (entry.reach, entry.step), entry)
        return [*found.values()][:number]

    def too_far_apart(self) -> dict[str, float]:
        """Return the layers whose scaled product in fp16 is farther off than bf16's, since it loses small values beside
        large ones: the largest share of bf16's error, the farthest layer first."""
        shares: dict[str, float] = {}
        for step in self.steps:
            for name, values in step.items():
                shares[name] = max(shares.get(name, 1.0), values.apart)
        return {name: shares[name] for name in sorted(shares, key=lambda name: -shares[name]) if shares[name] > 1}


class Probe:
    """Watches a module's layers and blocks, call by call. Its hooks are there while a call runs, and then gone.

    Copies of the module may run at the same time, each in a thread of its own.
    """

    def __init__(self, module: torch.nn.Module, anatomy: ModuleStructure):
        half = any(parameter.dtype in HALF_DTYPES for parameter in module.parameters())
        layers = {name: layer for name, layer in leaves(module).items() if _is_watched(layer, half)}
        self._modules = layers | {name: module.get_submodule(name) for name in (*anatomy.blocks, *anatomy.groups)}
        self._anatomy = anatomy
        self._groups: dict[str, Peak] = {}
        self._step: dict[str, Values] = {}
        self._steps: list[dict[str, Values]] = []
        self._lock = threading.Lock()

    def watch(self, call: Callable[[], Result], twin: torch.nn.Module | None = None) -> Result:
        """Make the call, which runs the module, or its twin, in fp32, and return its result."""
        modules = {name: twin.get_submodule(name) for name in self._modules} if twin else self._modules
        seen: list[tuple[str, torch.Tensor]] = []

        def see(name: str, layer: torch.nn.Module, given: Any, made: Any) -> None:
            output = largest(made)
            apart = error_beside_bf16(layer, given[0] if given else None)
            seen.append((name, torch.stack([each.to(output.device) for each in (largest(given), output, apart)])))

        with hooked(modules, see):
            result = call()
        if seen:
            device = seen[0][1].device
            numbers = torch.stack([each.to(device) for _, each in seen]).tolist()
            with self._lock:
                for (name, _), (given, made, apart) in zip(seen, numbers, strict=True):
                    self._add(name, Values(Peak(given, made), apart))
        return result

    def _add(self, name: str, values: Values) -> None:
        if name in self._anatomy.groups:
            self._groups[name] = self._groups.get(name, values.peak).widened(values.peak)
        else:
            self._step[name] = self._step.get(name, values).widened(values)

    def end_step(self) -> None:
        """End a step: what was watched since the step before belongs to it."""
        self._steps.append(self._step)
        self._step = {}

    @property
    def probed(self) -> Probed:
        return Probed(self._anatomy, tuple(self._steps), dict(self._groups))


@dataclass(frozen=True)
class Verdict:
    """Whether a dtype holds what was measured, and how."""

    dtype: str
    learned: PrecisionOverrides  # what a run has to know so that nothing fails
    wide: bool  # the residual stream is float32
    reason: str

    @property
    def fits(self) -> bool:
        return not self.learned.whole_run_fp32

    @property
    def plan(self) -> str:
        """How a run in this dtype would go, in a few words."""
        if not self.fits:
            return f"{self.dtype} does not do"
        how = ["wide"] if self.wide else []
        how += self.learned.in_words()
        return f"{self.dtype} {' + '.join(how)}" if how else self.dtype + (" plain" if self.dtype == "fp16" else "")


@dataclass(frozen=True)
class ProbeResult:
    """What was measured, and what is recommended."""

    model: str
    architecture: Architecture
    plan: Plan  # as it is
    sampled: str  # what, for people: "64×64, 9 frames, seed 0"
    probed: Probed
    timesteps: tuple[float | None, ...]
    seconds: float  # of the run
    chosen: Verdict
    to_apply: str  # how the user does what is recommended; "" where nothing has to be done
    profile: Profile | None = None  # None where there is nothing to learn

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
    def cost(self) -> str:
        steps = len(self.probed.steps)
        return f"{steps} step{'' if steps == 1 else 's'} in {self.seconds:.3g} s; runs without the probe pay nothing"

    def text(self) -> str:
        """For people."""
        lines = [
            self.headline,
            f"    because {self._because()}",
            f"    {f'To apply it: {self.to_apply}.' if self.to_apply else 'Nothing has to be set for it.'}",
            "Each precision:",
            *(f"    {verdict.plan}: {verdict.reason}" for verdict in self.verdicts),
            f"The largest of {len(self.probed.entries())} layers and blocks:",
            *(f"    {e.reach:.3g} in {self.name_of(e)}, step {e.step + 1}" for e in self.probed.worst(WORST)),
        ]
        if apart := self.probed.too_far_apart():
            named = ", ".join(f"'{name}' {share:.3g} ×" for name, share in [*apart.items()][:WORST])
            lines.append(f"Too far apart for scaled products in fp16: {len(apart)} layers, by bf16's error: {named}")
        return "\n".join([*lines, f"Cost: {self.cost}"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return for_json(
            {
                "summary": self.headline,
                "model": self.model,
                "architecture": self.architecture.name,
                "dtype": self.chosen.dtype,
                "plan": self.chosen.plan,
                "wide": self.chosen.wide,
                "learned": asdict(self.chosen.learned),
                "reason": self._because(),
                "verdicts": [asdict(v) | {"plan": v.plan, "fits": v.fits} for v in self.verdicts],
                "worst": [asdict(entry) | {"step": entry.step + 1} for entry in self.probed.worst(WORST)],
                "too_far_apart": self.probed.too_far_apart(),
                "measured_steps": len(self.probed.steps),
                "timesteps": self.timesteps,
                "seconds": self.seconds,
                "profile": self.profile_text,
            }
        )

    def name_of(self, entry: Entry) -> str:
        in_stream = self.probed.anatomy.stream is not None and entry.name in self.probed.anatomy.blocks
        return f"residual stream behind {entry.name}" if in_stream else entry.name

    def _because(self) -> str:
        if self.chosen.dtype == self.plan.dtype:
            return f"{self.plan.reason}; {self.chosen.reason}"
        own = judge(self.probed, self.plan.dtype)
        return f"{own.dtype} does not hold it: {own.reason}"


def judge(probed: Probed, dtype: str) -> Verdict:
    """Say whether a dtype holds what was measured, and what it needs for it."""
    peaks, anatomy = probed.peaks(), probed.anatomy
    finding = diagnose_from_fp32_peaks(peaks, anatomy, dtype)
    learned = escalate_overrides(NOTHING, finding, anatomy, dtype)[0] if finding else NOTHING
    settled = learned.everything or learned.whole_run_fp32
    if finding and not settled and diagnose_from_fp32_peaks(peaks, anatomy, dtype, learned.parts, wide=learned.wide):
        learned = PrecisionOverrides(everything=dtype == "fp16", whole_run_fp32=dtype != "fp16")
    shares = probed.too_far_apart() if dtype == "fp16" else {}
    if scaled := next((name for name in shares if _is_scaled(name, anatomy, learned)), ""):
        said = (
            f"'{scaled}' is given values too far apart: its scaled product in fp16 is {shares[scaled]:.3g} × as far off"
        )
        return Verdict(dtype, PrecisionOverrides(whole_run_fp32=True), False, f"{said} as bf16's")
    return Verdict(dtype, learned, learned.wide, finding.reason if finding else _why_it_fits(probed, dtype))


def recommend(probed: Probed, dtype: str, *, native_bf16: bool) -> Verdict:
    """Return the first verdict that fits, of: the plan's dtype, bf16 where the card computes it natively, the plan's
    dtype with every layer wide, fp32."""
    candidates = dict.fromkeys((dtype, *(("bf16",) if native_bf16 else ()), "fp32"))
    fitting = [verdict for verdict in (judge(probed, candidate) for candidate in candidates) if verdict.fits]
    cheap = (verdict for verdict in fitting if verdict.dtype in (dtype, "bf16") and not verdict.learned.everything)
    return next(cheap, fitting[0] if fitting else judge(probed, "fp32"))


def _is_scaled(name: str, anatomy: ModuleStructure, learned: PrecisionOverrides) -> bool:
    """Return whether a layer is wide in fp16: those that write to a known stream always are."""
    return learned.everything or covered(name, learned.wide_parts) or adapted(name) in anatomy.writers


def _why_it_fits(probed: Probed, dtype: str) -> str:
    ends = f"{dtype} ends at {RANGE[dtype]:.5g}"
    entry = next(iter(probed.entries()), None)
    return f"the most is {entry.reach:.3g}, in '{entry.name}'; {ends}" if entry else ends


def _is_watched(layer: torch.nn.Module, half: bool) -> bool:
    """half: the module has weights in half precision. In one that has none, each layer counts, in fp32 or not."""
    return counts(layer) if half else not isinstance(layer, torch.nn.Dropout)
