"""What failures teach of a module, where a call left its dtype's range, and what follows: pure data, without torch.

All of it is decided from measured peaks; no tensor is touched here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from ..trust.message import Message, joined

if TYPE_CHECKING:
    import torch

# How far fp16 accumulation may change a step's output, as a share of its norm. Less than bf16, in which models run by
# default, comes to on the networks of docs/quantised.md (0.007 to 0.014); ten roundings to fp16 (2**-11 each).
MAX_FP16_ERROR = 0.005


@dataclass(frozen=True)
class PrecisionOverrides:
    """What failures taught about a module in one half-precision dtype."""

    wide: bool = False  # the residual stream is float32
    islands: tuple[str, ...] = ()  # blocks, or parts outside of blocks, that run in fp32
    whole_run_fp32: bool = False  # half precision is not tried any more
    wide_parts: tuple[str, ...] = ()  # blocks, or parts outside of blocks, of which every layer is wide
    everything: bool = False  # every layer of the module is wide
    unquantised: tuple[str, ...] = ()  # layers that stay in half precision where the others are quantised
    fp16_error: float | None = None  # change of a step by fp16 accumulation; 1: full or not finite; None: unchecked

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that do not run in half precision as the rest does."""
        return (*self.wide_parts, *self.islands)

    @property
    def to_share(self) -> PrecisionOverrides:
        """Return what a profile may hold of it: nothing that belongs to one run alone."""
        return replace(self, wide=False, whole_run_fp32=False)

    def with_component(self, name: str, its: PrecisionOverrides) -> PrecisionOverrides:
        """Return what this component and another one of the same run learned.

        name, its: the other component, and what it learned. Its parts have its name before theirs; where every layer
        of it is wide, it counts as one wide part.
        """
        islands, wide_parts = (tuple(f"{name}.{part}" for part in parts) for parts in (its.islands, its.wide_parts))
        return replace(
            self,
            islands=self.islands + islands,
            whole_run_fp32=self.whole_run_fp32 or its.whole_run_fp32,
            wide_parts=self.wide_parts + ((name,) if its.everything else wide_parts),
            unquantised=self.unquantised + tuple(f"{name}.{layer}" for layer in its.unquantised),
        )

    def in_words(self) -> list[str]:
        """Return a few words for each thing that a run does otherwise, apart from the stream."""
        said: list[str] = [EVERYTHING] if self.everything else []
        said += [Message("{} protected", parts_in_words(self.wide_parts))] if self.wide_parts else []
        said += [Message("{} in fp32", parts_in_words(self.islands))] if self.islands else []
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
EVERYTHING = Message("overflow protection in every layer")
STREAM = Message("overflow protection on")
STAY = Message("the rest of the run in fp32")


def parts_in_words(modules: tuple[str, ...]) -> str:
    """Name up to three modules; of more, say how many there are."""
    return ", ".join(f"'{name}'" for name in modules) if len(modules) <= 3 else Message("{} parts", len(modules))


def covered(name: str, islands: Iterable[str]) -> bool:
    """Return whether a module is one of the islands, or inside one."""
    return any(covers(island, name) for island in islands)


def largest_of(islands: Iterable[str]) -> tuple[str, ...]:
    """Return the islands, each once, without those that are inside another one."""
    found = tuple(dict.fromkeys(islands))
    return tuple(name for name in found if not covered(name, set(found) - {name}))


def covers(part: str, name: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


@dataclass(frozen=True)
class Stream:
    """Where a denoiser's residual stream runs, by module names."""

    blocks: str  # the ModuleList of blocks
    starts: tuple[str, ...]  # layers whose output starts the stream
    writers: tuple[str, ...]  # layers in each block whose output is added to the stream
    norms: tuple[str, ...]  # layer norms in each block that read the stream
    last_norms: tuple[str, ...]  # layer norms behind the last block that read it
    readers: tuple[str, ...] = ()  # modules in each block that compute in the dtype of what they are given

    def writer_names(self, module: Any) -> list[str]:
        """Return the full names in `module` of the layers that start the stream, and of all that write to it."""
        return [*self.starts, *self._in_blocks(module, self.writers)]

    def reader_names(self, module: Any) -> list[str]:
        """Return the full names of the readers in `module`."""
        return self._in_blocks(module, self.readers)

    def norm_names(self, module: Any) -> list[str]:
        """Return the full names of all norms in `module` that read the stream."""
        return [*self._in_blocks(module, self.norms), *self.last_norms]

    def _in_blocks(self, module: Any, inner: tuple[str, ...]) -> list[str]:
        blocks = dict(module.get_submodule(self.blocks).named_children())
        return [f"{self.blocks}.{block}.{name}" for block in blocks for name in inner]


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

    blocks: tuple[str, ...] = ()  # what becomes an island as a whole
    stream: Stream | None = None  # the residual stream, where it is known
    norms: frozenset[str] = frozenset()  # what reads the stream
    writers: frozenset[str] = frozenset()  # what starts the stream or writes to it
    groups: tuple[str, ...] = ()  # modules outside of the blocks that hold layers, and no block: islands too
    everything: bool = False  # what failed in fp16 is tried with every layer wide, and never with islands

    @classmethod
    def of(cls, module: torch.nn.Module, parts: Iterable[str], stream: Stream | None = None) -> ModuleStructure:
        """Return the anatomy of a module.

        parts: names of its blocks, or of lists of blocks.
        """
        from torch.nn import ModuleList

        blocks: list[str] = []
        for part in parts:
            found = module.get_submodule(part)
            is_list = isinstance(found, ModuleList)
            blocks += [f"{part}.{name}" for name, _ in found.named_children()] if is_list else [part]
        if stream:
            blocks = [*dict.fromkeys(name.partition(".")[0] for name in stream.starts), *blocks]
        groups = tuple(
            name
            for name, part in module.named_modules()
            if next(part.children(), None) is not None and cls(tuple(blocks)).home(name) == name and name not in blocks
        )
        if stream is None:
            return cls(tuple(blocks), groups=groups)
        norms, writers = frozenset(stream.norm_names(module)), frozenset(stream.writer_names(module))
        return cls(tuple(blocks), stream, norms, writers, groups)

    def home(self, name: str) -> str | None:
        """Return the block that a module is in, or the module itself outside of the blocks; None where it holds
        blocks."""
        if any(not name or block.startswith(f"{name}.") for block in self.blocks or ("",)):
            return None
        return next((block for block in self.blocks if covers(block, name)), name)

    @property
    def repeated(self) -> tuple[str, ...]:
        """The names of the blocks, without those of what starts the stream."""
        return tuple(name for name in self.blocks if not self.stream or name.startswith(f"{self.stream.blocks}."))

    def parts(self, names: Iterable[str]) -> list[str]:
        """Return those names of modules that may be islands: the blocks', and those outside of the blocks."""
        return [name for name in names if self.home(name) == name]

    def island(self, name: str, peaks: Mapping[str, Peak], dtype: str, islands: Collection[str] = ()) -> str | None:
        """Return what would have to run in fp32 for a module's sake, apart from the islands that there are already;
        None where nothing helps.

        It is the module's block, or outside of the blocks the smallest part around the module whose input and output
        fit in the dtype.
        """
        home = self.home(name)
        if home is None or home in self.blocks:
            return None if home in islands else home
        around = sorted((group for group in self.groups if covers(group, name) and group != name), key=len)
        parts = (part for part in (name, *reversed(around)) if not covered(part, islands))
        return next((part for part in parts if self._fits(part, peaks, dtype)), None)

    def _fits(self, part: str, peaks: Mapping[str, Peak], dtype: str) -> bool:
        """Return whether what a part is given and what it puts out fit in the dtype. One that reads the stream is given
        it in float32 where it does not fit. A part that was not measured counts as fitting, and is tried."""
        reads_stream = any(covers(part, norm) for norm in self.norms)
        peak = peaks.get(part, Peak(0.0, 0.0))
        return peak.output <= RANGE[dtype] and (reads_stream or peak.input <= RANGE[dtype])

    def widens(self, dtype: str) -> bool:
        """Return whether a float32 stream has more range than one in `dtype`: bf16 has fp32's."""
        return self.stream is not None and dtype == "fp16"

    def inner(self, name: str, peak: Peak) -> float:
        """Return max |x| of what a layer reaches apart from the stream."""
        if name in self.groups or (name in self.blocks and not self.stream):
            return 0.0
        if name in self.norms:
            return peak.output
        return peak.input if adapted(name) in self.writers else max(peak.input, peak.output)


@dataclass(frozen=True)
class OverflowDiagnosis:
    """Why a call failed."""

    reason: str
    module: str = ""  # the first to leave the range; "" where none was found
    peak: float | None = None  # max |x| there in fp32, where it was measured
    stream: float | None = None  # max |x| of the residual stream, where that left the range
    islands: tuple[str, ...] = ()  # what would have to run in fp32
    hopeless: bool = False  # neither a wide stream nor an island helps
    quantised: str = ""  # a quantised layer that came out broken although its input was not
    fp16_accumulation: bool = False  # it accumulated in fp16, which may be why


def diagnose_from_fp32_peaks(
    peaks: Mapping[str, Peak],
    anatomy: ModuleStructure,
    dtype: str,
    islands: Collection[str] = (),
    *,
    wide: bool = False,
) -> OverflowDiagnosis | None:
    """Return what left the range of `dtype`, told by the peaks of layers and blocks in fp32; None where nothing did.

    peaks: in the order in which layers ran, and of the anatomy's groups too.
    islands: names of what runs in fp32 already, or wide.
    wide: the stream is float32 already.
    """
    limit, here = RANGE[dtype], Message("{}'s {:.5g}", dtype, RANGE[dtype])
    stream = {name: peaks[name].input for name in peaks if name in anatomy.norms}
    stream = {name: value for name, value in stream.items() if not value <= (RANGE["fp32"] if wide else limit)}
    handed_on = {} if anatomy.stream else {name: peaks[name].output for name in peaks if name in anatomy.blocks}
    handed_on = {name: value for name, value in handed_on.items() if not value <= limit}
    inner = {name: anatomy.inner(name, peak) for name, peak in peaks.items()}
    inner = {name: value for name, value in inner.items() if not value <= limit and not covered(name, islands)}
    first = next((name for name in peaks if name in inner or name in stream or name in handed_on), None)
    if first is None:
        return None
    reasons: list[str] = []
    if inner:
        name, peak = next(iter(inner.items()))
        reasons.append(Message("'{}' reaches {:.3g}, beyond {}{}", name, peak, here, _beside(anatomy, dtype, name)))
    if stream:
        reasons.append(Message("the residual stream reaches {:.3g}, beyond {}", max(stream.values(), key=order), here))
    if handed_on:
        name, peak = next(iter(handed_on.items()))
        reasons = [Message("'{}' puts out {:.3g}, beyond {}: what comes after it cannot take it", name, peak, here)]
    wanted = [anatomy.island(name, peaks, dtype) for name in inner]
    return OverflowDiagnosis(
        joined("; ", reasons),
        first,
        {**handed_on, **inner, **stream}[first],
        max(stream.values(), key=order) if stream else None,
        largest_of(island for island in wanted if island is not None),
        hopeless=bool(handed_on) or None in wanted,
    )


def diagnose_from_half_run(
    name: str | None,
    peaks: Mapping[str, Peak],
    anatomy: ModuleStructure,
    dtype: str,
    islands: Collection[str] = (),
    quantised: Collection[str] = (),
    *,
    everything: bool = False,
    fp16_accumulation: bool = False,
) -> OverflowDiagnosis:
    """Say why a call failed in half precision although nothing leaves the dtype's range when it runs in fp32.

    name: the module whose output was broken when the half-precision call was made once more; None where none was.
    quantised: the layers that were quantised in it.
    everything: every layer was wide in it.
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
    reason += Message(", apart from the residual stream") if anatomy.widens(dtype) else ""
    if everything:
        reason = Message("values differ too much in size, or are too large, for products in {}, {}", dtype, inside)
    island = anatomy.island(name, peaks, dtype, islands)
    return OverflowDiagnosis(reason, name, peak, islands=() if island is None else (island,), hopeless=island is None)


def escalate_overrides(
    learned: PrecisionOverrides, finding: OverflowDiagnosis, anatomy: ModuleStructure, dtype: str
) -> tuple[PrecisionOverrides, str]:
    """Return what is known after a failure, and what follows from it in words; "" where nothing follows.

    In fp16, a part is made wide before it is run in fp32, and every layer is made wide before the rest of the run goes
    to fp32.
    """
    if finding.quantised:
        learned = replace(learned, unquantised=(*learned.unquantised, finding.quantised))
        return learned, Message("'{}' unquantised from here on", finding.quantised)
    if finding.fp16_accumulation:
        return replace(learned, fp16_error=1.0), Message("no fp16 accumulation from here on")
    can_widen = dtype == "fp16"
    everything = can_widen and learned.everything
    broken = finding.stream is not None and not math.isfinite(finding.stream)
    if broken or anatomy.everything or finding.hopeless or (everything and finding.islands):
        if can_widen and not everything and not broken:
            return PrecisionOverrides(everything=True), Message("{} from here on", EVERYTHING)
        return replace(learned, whole_run_fp32=True), STAY
    actions: list[Message] = []
    if finding.stream is not None and anatomy.widens(dtype):
        learned = replace(learned, wide=True)
        actions.append(Message("its residual stream protected"))
    tried = {name: _tried(name, learned) for name in finding.islands}
    widened = tuple(name for name in finding.islands if can_widen and not tried[name])
    if widened:
        learned = replace(learned, wide_parts=largest_of((*learned.wide_parts, *widened)))
        actions.append(Message("{} protected", parts_in_words(widened)))
    if islands := largest_of(tried[name] or name for name in finding.islands if name not in widened):
        kept = tuple(name for name in learned.wide_parts if not covered(name, islands))
        learned = replace(learned, wide_parts=kept, islands=largest_of((*learned.islands, *islands)))
        actions.append(Message("{} in fp32", parts_in_words(islands)))
    done = reduce(lambda one, other: Message("{} and {}", one, other), actions) if actions else ""
    return learned, Message("{} from here on", done) if done else ""


def _tried(name: str, learned: PrecisionOverrides) -> str:
    """Return the name of what has been wide already for a part's sake: what the part is in, or the part itself where it
    holds an island; else ""."""
    holds_island = any(covers(name, island) for island in learned.islands)
    return next((part for part in learned.wide_parts if covers(part, name)), name if holds_island else "")


def _beside(anatomy: ModuleStructure, dtype: str, name: str) -> str:
    if not anatomy.widens(dtype):
        return ""
    where = Message("inside a block") if covered(name, anatomy.repeated) else Message("outside of the blocks")
    return Message(": {}, apart from the residual stream", where)


def order(value: float) -> float:
    """Return the value to sort a number by: NaN is the largest."""
    return math.inf if math.isnan(value) else value


def adapted(name: str) -> str:
    """Return the name of the layer that a part of an adapter (peft's LoRA) belongs to; any other name as it is."""
    return name.split(".base_layer")[0].split(".lora_")[0]


def _larger(a: float, b: float) -> float:
    """Return the larger number; NaN where either is NaN."""
    return b if math.isnan(b) or b > a else a
