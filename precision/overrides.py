"""What failures teach of a module, where a call left its dtype's range, and what follows: pure data, without torch.

All of it is decided from measured peaks; no tensor is touched here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..trust.message import Message

# How far fp16 accumulation may change a step's output, as a share of its norm. Less than bf16, in which models run by
# default, comes to on the networks of docs/quantised.md (0.007 to 0.014); ten roundings to fp16 (2**-11 each).
MAX_FP16_ERROR = 0.005


@dataclass(frozen=True)
class PrecisionOverrides:
    """What failures taught about a module in one half-precision dtype."""

    whole_run_fp32: bool = False  # half precision is not tried any more
    all_layers_scaled: bool = False  # every layer of the module is scaled
    unquantised: tuple[str, ...] = ()  # layers that stay in half precision where the others are quantised
    fp16_error: float | None = None  # change of a step by fp16 accumulation; 1: full or not finite; None: unchecked

    @property
    def to_share(self) -> PrecisionOverrides:
        """Return what a profile may hold of it: nothing that belongs to one run alone."""
        return replace(self, whole_run_fp32=False)

    def with_component(self, name: str, its: PrecisionOverrides) -> PrecisionOverrides:
        """Return what this component and another one of the same run learned.

        name, its: the other component, and what it learned. Its layers have its name before theirs.
        """
        return replace(
            self,
            whole_run_fp32=self.whole_run_fp32 or its.whole_run_fp32,
            all_layers_scaled=self.all_layers_scaled or its.all_layers_scaled,
            unquantised=self.unquantised + tuple(f"{name}.{layer}" for layer in its.unquantised),
        )

    def in_words(self) -> list[str]:
        """Return a few words for each thing that a run does otherwise."""
        said: list[str] = [ALL_LAYERS_SCALED] if self.all_layers_scaled else []
        said += [Message("{} unquantised", parts_in_words(self.unquantised))] if self.unquantised else []
        return said


def fp16_accumulation_in_words(error: float) -> str:
    """Say what became of fp16 accumulation, given a `PrecisionOverrides.fp16_error`."""
    if error <= MAX_FP16_ERROR:
        return Message("on, it changes a step by {:.2%}", error)
    if error < 1:
        return Message("off, it changes a step by {:.2%}, more than {:.1%}", error, MAX_FP16_ERROR)
    return Message("off, a step with it is NaN, infinite or 100% wrong")


NOTHING = PrecisionOverrides()
ALL_LAYERS_SCALED = Message("overflow protection")
STAY = Message("the rest of the run in fp32")


def parts_in_words(modules: tuple[str, ...]) -> str:
    """Name up to three modules; of more, say how many there are."""
    return ", ".join(f"'{name}'" for name in modules) if len(modules) <= 3 else Message("{} parts", len(modules))


def covered(name: str, parts: Iterable[str]) -> bool:
    """Return whether a module is one of the parts, or inside one."""
    return any(covers(part, name) for part in parts)


def largest_of(parts: Iterable[str]) -> tuple[str, ...]:
    """Return the parts, each once, without those that are inside another one."""
    found = tuple(dict.fromkeys(parts))
    return tuple(name for name in found if not covered(name, set(found) - {name}))


def covers(part: str, name: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


RANGE = {"fp16": 65504.0, "bf16": (2 - 2.0**-7) * 2.0**127, "fp32": (2 - 2.0**-23) * 2.0**127}  # the largest value


@dataclass(frozen=True)
class Peak:
    """max |x| of what went into a layer and of what came out; inf or NaN where it overflowed."""

    input: float
    output: float

    def widened(self, other: Peak) -> Peak:
        """Return the larger of both, for input and output; NaN where either is NaN."""
        return Peak(_larger(self.input, other.input), _larger(self.output, other.output))


def reach(name: str, peak: Peak, blocks: Collection[str]) -> float:
    """Return max |x| that counts for a layer or block: what a block puts out, or what a layer reaches."""
    return peak.output if name in blocks else _larger(peak.input, peak.output)


@dataclass(frozen=True)
class OverflowDiagnosis:
    """Why a call failed."""

    reason: str
    module: str = ""  # the first to leave the range; "" where none was found
    peak: float | None = None  # max |x| there in fp32, where it was measured
    located: bool = True  # it is known where
    quantised: str = ""  # a quantised layer that came out broken although its input was not
    fp16_accumulation: bool = False  # it accumulated in fp16, which may be why


def diagnose_from_fp32_peaks(
    peaks: Mapping[str, Peak], blocks: Collection[str], dtype: str
) -> OverflowDiagnosis | None:
    """Return what left the range of `dtype`, told by the peaks of layers and blocks in fp32; None where nothing did.

    peaks: in the order in which layers ran.
    blocks: the names of those of them that are blocks, of which only the output counts.
    """
    limit, here = RANGE[dtype], Message("{}'s {:.5g}", dtype, RANGE[dtype])
    beyond = {name: value for name in peaks if not (value := reach(name, peaks[name], blocks)) <= limit}
    if not beyond:
        return None
    first = next(iter(beyond))
    name = next((name for name in beyond if name in blocks), first)
    reason = Message("'{}' reaches {:.3g}, beyond {}", name, beyond[name], here)
    if name in blocks:
        reason = Message(
            "'{}' puts out {:.3g}, beyond {}: what comes after it cannot take it", name, beyond[name], here
        )
    return OverflowDiagnosis(reason, first, beyond[first])


def diagnose_from_half_run(
    name: str | None,
    peaks: Mapping[str, Peak],
    dtype: str,
    quantised: Collection[str] = (),
    *,
    all_layers_scaled: bool = False,
    fp16_accumulation: bool = False,
) -> OverflowDiagnosis:
    """Say why a call failed in half precision although nothing leaves the dtype's range when it runs in fp32.

    name: the module whose output was broken when the half-precision call was made once more; None where none was.
    quantised: the layers that were quantised in it.
    all_layers_scaled: every layer was scaled in it.
    fp16_accumulation: its products accumulated in fp16.
    """
    if name is None:
        reason = Message("no layer's output leaves {}'s range, and computed again it did not fail", dtype)
        return OverflowDiagnosis(reason, located=False)
    peak = peaks[name].output if name in peaks else None
    if fp16_accumulation:
        reason = Message("'{}' is broken with fp16 accumulation, although its output fits", name)
        return OverflowDiagnosis(reason, name, peak, fp16_accumulation=True)
    if name in quantised:
        reason = Message("'{}' is broken where it is quantised, and its input is not", name)
        return OverflowDiagnosis(reason, name, peak, quantised=name)
    inside = Message("inside '{}'", name) if name else Message("outside of all layers")
    inside = Message("inside attention") if "attn" in name or "attention" in name else inside
    reason = Message("'{}'", name) if name else Message("the output")
    reason += Message(" is broken in {}, although no layer's output leaves its range: it overflows {}", dtype, inside)
    if all_layers_scaled:
        reason = Message("values differ too much in size, or are too large, for products in {}, {}", dtype, inside)
    return OverflowDiagnosis(reason, name, peak)


def escalate_overrides(learned: PrecisionOverrides, finding: OverflowDiagnosis) -> tuple[PrecisionOverrides, str]:
    """Return what is known after a failure, and what follows from it in words; "" where nothing follows.

    Every layer is scaled before the rest of the run goes to fp32.
    """
    if finding.quantised:
        learned = replace(learned, unquantised=(*learned.unquantised, finding.quantised))
        return learned, Message("'{}' unquantised from here on", finding.quantised)
    if finding.fp16_accumulation:
        return replace(learned, fp16_error=1.0), Message("no fp16 accumulation from here on")
    if not finding.located:
        return learned, ""
    if not learned.all_layers_scaled:
        return replace(learned, all_layers_scaled=True), Message("{} from here on", ALL_LAYERS_SCALED)
    return replace(learned, whole_run_fp32=True), STAY


def order(value: float) -> float:
    """Return the value to sort a number by: NaN is the largest."""
    return math.inf if math.isnan(value) else value


def _larger(a: float, b: float) -> float:
    """Return the larger number; NaN where either is NaN."""
    return b if math.isnan(b) or b > a else a
