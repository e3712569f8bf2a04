"""What every layer of a module reaches while it computes in fp32, and what follows: dtype, wide stream, islands.

It computes in fp32, so that the measurement cannot overflow itself: it shows how far beyond fp16's range a layer would
go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .dtypes import FP16_MAX
from .fallback import counts
from .half_products import error_beside_bf16
from .observe import floating, hooked, largest, leaves
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
from .upcast import HALF_DTYPES

FP16_TINY: float = torch.finfo(torch.float16).tiny  # 2^-14: below it, fp16 loses digits
_SLICE = 2**22  # elements that are counted at once: little memory beside the activations

Result = TypeVar("Result")


@dataclass(frozen=True)
class Values:
    """What a layer or block did in one step. Shares are of the values that it put out, 0 to 1."""

    peak: Peak
    subnormal: float  # 0 < |x| < 2^-14: fp16 keeps fewer digits of them, or none
    over_eighth: float  # |x| > 65504/8
    over_half: float  # |x| > 65504/2
    apart: float  # the error of its scaled product in fp16, as a share of bf16's; 0 where it multiplies nothing


@dataclass(frozen=True)
class Entry:
    """A layer or block in the step in which it reached most."""

    name: str
    reach: float  # max |x|
    step: int  # counted from 0
    values: Values  # of that step


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
        """Return the peaks over all steps of what `find` looks at: layers and groups, and blocks where there is no
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
                    found[name] = Entry(name, reach, index, values)
        return sorted(found.values(), key=lambda entry: -order(entry.reach))

    def too_far_apart(self) -> dict[str, float]:
        """Return the layers whose scaled product in fp16 is farther off than bf16's, since it loses small values beside
        large ones: the largest share of bf16's error, the farthest layer first."""
        shares: dict[str, float] = {}
        for name, values in ((name, values) for step in self.steps for name, values in step.items()):
            shares[name] = max(shares.get(name, 1.0), values.apart)
        return {name: shares[name] for name in sorted(shares, key=lambda name: -shares[name]) if shares[name] > 1}

    def worst(self, number: int = 10) -> list[Entry]:
        """Return the first `number` of `entries`, without those that only repeat another: a value that several layers
        are given or hand on stands there once, and so does the residual stream, which runs through all blocks."""
        stream, seen, found = False, set[tuple[float, int]](), list[Entry]()
        for entry in self.entries():
            in_stream = self.anatomy.stream is not None and entry.name in self.anatomy.blocks
            if (in_stream and stream) or (entry.reach, entry.step) in seen:
                continue
            stream = stream or in_stream
            seen.add((entry.reach, entry.step))
            found.append(entry)
        return found[:number]


class Probe:
    """A watch on a module's layers and blocks, call by call. Its hooks are there while a call runs, and then gone.

    Copies of the module may run at the same time, each in a thread of its own.
    """

    def __init__(self, module: torch.nn.Module, anatomy: ModuleStructure):
        half = any(parameter.dtype in HALF_DTYPES for parameter in module.parameters())
        layers = {name: layer for name, layer in leaves(module).items() if _looked_at(layer, half)}
        self._modules = layers | {name: module.get_submodule(name) for name in (*anatomy.blocks, *anatomy.groups)}
        self._anatomy = anatomy
        self._groups: dict[str, Peak] = {}
        self._step: dict[str, list[_Call]] = {}
        self._steps: list[dict[str, Values]] = []
        self._lock = threading.Lock()

    def watch(self, call: Callable[[], Result], twin: torch.nn.Module | None = None) -> Result:
        """Make the call, which runs the module, or its twin, in fp32, and return its result."""
        modules = {name: twin.get_submodule(name) for name in self._modules} if twin else self._modules
        names: list[str] = []
        peaks: list[torch.Tensor] = []
        numbers: list[torch.Tensor] = []

        def see(name: str, layer: torch.nn.Module, given: Any, made: Any) -> None:
            output = largest(made)
            names.append(name)
            apart = error_beside_bf16(layer, given[0] if given else None)
            peaks.append(torch.stack([each.to(output.device) for each in (largest(given), output, apart)]))
            numbers.append(_count(made).to(output.device))

        with hooked(modules, see):
            result = call()
        if names:
            device = peaks[0].device
            seen_peaks = torch.stack([peak.to(device) for peak in peaks]).tolist()
            seen_numbers = torch.stack([number.to(device) for number in numbers]).tolist()
            with self._lock:
                for name, (given, made, apart), number in zip(names, seen_peaks, seen_numbers, strict=True):
                    self._add(name, _Call(Peak(given, made), apart, *number))
        return result

    def _add(self, name: str, call: _Call) -> None:
        if name in self._anatomy.groups:
            self._groups[name] = self._groups.get(name, call.peak).widened(call.peak)
        else:
            self._step.setdefault(name, []).append(call)

    def end_step(self) -> None:
        """End a step: what was watched since the step before belongs to it."""
        self._steps.append({name: _together(calls) for name, calls in self._step.items()})
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


@dataclass(frozen=True)
class _Call:
    peak: Peak
    apart: float
    subnormal: int
    over_eighth: int
    over_half: int
    values: int


def _together(calls: list[_Call]) -> Values:
    peak = calls[0].peak
    for call in calls[1:]:
        peak = peak.widened(call.peak)
    total = max(sum(call.values for call in calls), 1)
    return Values(
        peak,
        subnormal=sum(call.subnormal for call in calls) / total,
        over_eighth=sum(call.over_eighth for call in calls) / total,
        over_half=sum(call.over_half for call in calls) / total,
        apart=max(call.apart for call in calls),
    )


def _count(tree: Any) -> torch.Tensor:
    """Count how many values are subnormal, over 1/8 and over 1/2 of fp16's range, and how many there are. int64 [4]."""
    tensors = floating(tree)
    counted = torch.zeros(4, dtype=torch.int64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(_SLICE):
            size = part.abs()
            found = [(size > 0) & (size < FP16_TINY), size > FP16_MAX / 8, size > FP16_MAX / 2]
            counted[:3] += torch.stack([mask.sum() for mask in found]).to(counted.device)
        counted[3] += tensor.numel()
    return counted


def _looked_at(layer: torch.nn.Module, half: bool) -> bool:
    """Return whether a layer is watched.

    half: the module has weights in half precision. In one that has none, each layer counts, in fp32 or not.
    """
    return counts(layer) if half else not isinstance(layer, torch.nn.Dropout)
