"""What failures teach of a module, where a call left its dtype's range, and what follows: pure data, without torch.

All of it is decided from measured peaks; no tensor is touched here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..trust.message import Message

if TYPE_CHECKING:
    import torch

# How far fp16 accumulation may change a step's output, as a share of its norm. Less than bf16, in which models run by
# default, comes to on the networks of docs/quantised.md (0.007 to 0.014); ten roundings to fp16 (2**-11 each).
MAX_FP16_ERROR = 0.005


@dataclass(frozen=True)
class PrecisionOverrides:
    """What failures taught about a module in one half-precision dtype."""

    fp32_fallback_blocks: tuple[str, ...] = ()  # blocks, or parts outside of blocks, that run in fp32
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

        name, its: the other component, and what it learned. Its parts have its name before theirs.
        """
        fallback_blocks = tuple(f"{name}.{part}" for part in its.fp32_fallback_blocks)
        return replace(
            self,
            fp32_fallback_blocks=self.fp32_fallback_blocks + fallback_blocks,
            whole_run_fp32=self.whole_run_fp32 or its.whole_run_fp32,
            all_layers_scaled=self.all_layers_scaled or its.all_layers_scaled,
            unquantised=self.unquantised + tuple(f"{name}.{layer}" for layer in its.unquantised),
        )

    def in_words(self) -> list[str]:
        """Return a few words for each thing that a run does otherwise."""
        said: list[str] = [ALL_LAYERS_SCALED] if self.all_layers_scaled else []
        said += [Message("{} in fp32", parts_in_words(self.fp32_fallback_blocks))] if self.fp32_fallback_blocks else []
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


@dataclass(frozen=True)
class ModuleStructure:
    """A module's parts by their full names, as far as the guard needs them."""

    blocks: tuple[str, ...] = ()  # what becomes a fallback block as a whole
    groups: tuple[str, ...] = ()  # modules outside of the blocks that hold layers, and no block: fallback blocks too
    all_layers_scaled: bool = (
        False  # what failed in fp16 is tried with every layer scaled, and never with fallback blocks
    )

    @classmethod
    def of(cls, module: torch.nn.Module, parts: Iterable[str]) -> ModuleStructure:
        """Return the structure of a module.

        parts: names of its blocks, or of lists of blocks.
        """
        from torch.nn import ModuleList

        blocks: list[str] = []
        for part in parts:
            found = module.get_submodule(part)
            is_list = isinstance(found, ModuleList)
            blocks += [f"{part}.{name}" for name, _ in found.named_children()] if is_list else [part]
        groups = tuple(
            name
            for name, part in module.named_modules()
            if next(part.children(), None) is not None and cls(tuple(blocks)).home(name) == name and name not in blocks
        )
        return cls(tuple(blocks), groups)

    def home(self, name: str) -> str | None:
        """Return the block that a module is in, or the module itself outside of the blocks; None where it holds
        blocks."""
        if any(not name or block.startswith(f"{name}.") for block in self.blocks or ("",)):
            return None
        return next((block for block in self.blocks if covers(block, name)), name)

    def parts(self, names: Iterable[str]) -> list[str]:
        """Return those names of modules that may be fallback blocks: the blocks', and those outside of the blocks."""
        return [name for name in names if self.home(name) == name]

    def fallback_block(
        self, name: str, peaks: Mapping[str, Peak], dtype: str, fallback_blocks: Collection[str] = ()
    ) -> str | None:
        """Return what would have to run in fp32 for a module's sake, apart from the fallback blocks that there are
        already; None where nothing helps.

        It is the module's block, or outside of the blocks the smallest part around the module whose input and output
        fit in the dtype.
        """
        home = self.home(name)
        if home is None or home in self.blocks:
            return None if home in fallback_blocks else home
        around = sorted((group for group in self.groups if covers(group, name) and group != name), key=len)
        parts = (part for part in (name, *reversed(around)) if not covered(part, fallback_blocks))
        return next((part for part in parts if self._fits(part, peaks, dtype)), None)

    def _fits(self, part: str, peaks: Mapping[str, Peak], dtype: str) -> bool:
        """Return whether what a part is given and what it puts out fit in the dtype. A part that was not measured
        counts as fitting, and is tried."""
        peak = peaks.get(part, Peak(0.0, 0.0))
        return peak.output <= RANGE[dtype] and peak.input <= RANGE[dtype]

    def inner(self, name: str, peak: Peak) -> float:
        """Return max |x| of what a layer reaches by itself: 0 of what holds layers."""
        return 0.0 if name in self.groups or name in self.blocks else max(peak.input, peak.output)


@dataclass(frozen=True)
class OverflowDiagnosis:
    """Why a call failed."""

    reason: str
    module: str = ""  # the first to leave the range; "" where none was found
    peak: float | None = None  # max |x| there in fp32, where it was measured
    fallback_blocks: tuple[str, ...] = ()  # what would have to run in fp32
    hopeless: bool = False  # no fallback block helps
    quantised: str = ""  # a quantised layer that came out broken although its input was not
    fp16_accumulation: bool = False  # it accumulated in fp16, which may be why


def diagnose_from_fp32_peaks(
    peaks: Mapping[str, Peak], structure: ModuleStructure, dtype: str, parts: Collection[str] = ()
) -> OverflowDiagnosis | None:
    """Return what left the range of `dtype`, told by the peaks of layers and blocks in fp32; None where nothing did.

    peaks: in the order in which layers ran, and of the structure's groups too.
    parts: names of what runs in fp32 already.
    """
    limit, here = RANGE[dtype], Message("{}'s {:.5g}", dtype, RANGE[dtype])
    handed_on = {name: peaks[name].output for name in peaks if name in structure.blocks}
    handed_on = {name: value for name, value in handed_on.items() if not value <= limit}
    inner = {name: structure.inner(name, peak) for name, peak in peaks.items()}
    inner = {name: value for name, value in inner.items() if not value <= limit and not covered(name, parts)}
    first = next((name for name in peaks if name in inner or name in handed_on), None)
    if first is None:
        return None
    if handed_on:
        name, peak = next(iter(handed_on.items()))
        reason = Message("'{}' puts out {:.3g}, beyond {}: what comes after it cannot take it", name, peak, here)
    else:
        name, peak = next(iter(inner.items()))
        reason = Message("'{}' reaches {:.3g}, beyond {}", name, peak, here)
    wanted = [structure.fallback_block(name, peaks, dtype) for name in inner]
    return OverflowDiagnosis(
        reason,
        first,
        {**handed_on, **inner}[first],
        largest_of(name for name in wanted if name is not None),
        hopeless=bool(handed_on) or None in wanted,
    )


def diagnose_from_half_run(
    name: str | None,
    peaks: Mapping[str, Peak],
    structure: ModuleStructure,
    dtype: str,
    fallback_blocks: Collection[str] = (),
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
        return OverflowDiagnosis(
            Message("no layer's output leaves {}'s range, and computed again it did not fail", dtype)
        )
    peak = peaks[name].output if name in peaks else None
    if fp16_accumulation:
        reason = Message("'{}' is broken with fp16 accumulation, although its output fits", name)
        return OverflowDiagnosis(reason, name, peak, fp16_accumulation=True)
    if name in quantised:
        return OverflowDiagnosis(
            Message("'{}' is broken where it is quantised, and its input is not", name), name, peak, quantised=name
        )
    inside = Message("inside '{}'", name) if name else Message("outside of all layers")
    inside = Message("inside attention") if "attn" in name or "attention" in name else inside
    reason = Message("'{}'", name) if name else Message("the output")
    reason += Message(" is broken in {}, although no layer's output leaves its range: it overflows {}", dtype, inside)
    if all_layers_scaled:
        reason = Message("values differ too much in size, or are too large, for products in {}, {}", dtype, inside)
    fallback_block = structure.fallback_block(name, peaks, dtype, fallback_blocks)
    wanted = () if fallback_block is None else (fallback_block,)
    return OverflowDiagnosis(reason, name, peak, fallback_blocks=wanted, hopeless=not wanted)


def escalate_overrides(
    learned: PrecisionOverrides, finding: OverflowDiagnosis, structure: ModuleStructure, dtype: str
) -> tuple[PrecisionOverrides, str]:
    """Return what is known after a failure, and what follows from it in words; "" where nothing follows.

    In fp16, every layer is scaled before the rest of the run goes to fp32. In bf16, parts run in fp32 before that.
    """
    if finding.quantised:
        learned = replace(learned, unquantised=(*learned.unquantised, finding.quantised))
        return learned, Message("'{}' unquantised from here on", finding.quantised)
    if finding.fp16_accumulation:
        return replace(learned, fp16_error=1.0), Message("no fp16 accumulation from here on")
    if not (finding.hopeless or finding.fallback_blocks or structure.all_layers_scaled):
        return learned, ""
    if dtype == "fp16" and not learned.all_layers_scaled:
        learned = replace(learned, all_layers_scaled=True, fp32_fallback_blocks=())
        return learned, Message("{} from here on", ALL_LAYERS_SCALED)
    if dtype == "fp16" or structure.all_layers_scaled or finding.hopeless:
        return replace(learned, whole_run_fp32=True), STAY
    fallback_blocks = largest_of((*learned.fp32_fallback_blocks, *finding.fallback_blocks))
    done = Message("{} in fp32", parts_in_words(largest_of(finding.fallback_blocks)))
    return replace(learned, fp32_fallback_blocks=fallback_blocks), Message("{} from here on", done)


def order(value: float) -> float:
    """Return the value to sort a number by: NaN is the largest."""
    return math.inf if math.isnan(value) else value


def _larger(a: float, b: float) -> float:
    """Return the larger number; NaN where either is NaN."""
    return b if math.isnan(b) or b > a else a
