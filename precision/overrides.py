"""Precision overrides: what a module needs after failures, the diagnosis of a failing call, the escalation that
follows, and the profile that keeps it for later runs. Pure data, without torch: decided from measured peaks."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..trust import foreign
from ..trust.atomic_files import write_whole
from ..trust.foreign import Foreign, Unreadable
from ..trust.message import Message, Told, for_file_name, for_terminal, joined, message_of, shown
from .arch import is_name

# The largest change of a step's output by fp16 accumulation, as a share of its norm: ten roundings to fp16 (2**-11
# each). bf16, in which models run by default, changes the networks of docs/quantised.md by 0.007 to 0.014.
MAX_FP16_ERROR = 0.005


@dataclass(frozen=True)
class PrecisionOverrides:
    """What a module needs after failures, in one half-precision dtype."""

    whole_run_fp32: bool = False  # half precision is not tried any more
    all_layers_scaled: bool = False  # every layer of the module is scaled
    unquantised: tuple[str, ...] = ()  # layers that stay in half precision where the others are quantised
    fp16_error: float | None = None  # change of a step by fp16 accumulation; 1: full or not finite; None: unchecked

    @property
    def to_share(self) -> PrecisionOverrides:
        """Return the part that a profile may hold: without what concerns this run alone."""
        return replace(self, whole_run_fp32=False)

    def with_component(self, name: str, its: PrecisionOverrides) -> PrecisionOverrides:
        """Merge the overrides of another component of the same run.

        name, its: the other component, and its overrides. Its layers are prefixed with its name.
        """
        return replace(
            self,
            whole_run_fp32=self.whole_run_fp32 or its.whole_run_fp32,
            all_layers_scaled=self.all_layers_scaled or its.all_layers_scaled,
            unquantised=self.unquantised + tuple(f"{name}.{layer}" for layer in its.unquantised),
        )

    def in_words(self) -> list[str]:
        """Return a few words for each override."""
        said: list[str] = [ALL_LAYERS_SCALED] if self.all_layers_scaled else []
        said += [Message("{} unquantised", parts_in_words(self.unquantised))] if self.unquantised else []
        return said


def fp16_accumulation_in_words(error: float) -> str:
    """Say whether fp16 accumulation is on and why, given a `PrecisionOverrides.fp16_error`."""
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


def outermost(parts: Iterable[str]) -> tuple[str, ...]:
    """Return the parts, each once, without those that are inside another one."""
    found = tuple(dict.fromkeys(parts))
    return tuple(name for name in found if not covered(name, set(found) - {name}))


def covers(part: str, name: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


RANGE = {"fp16": 65504.0, "bf16": (2 - 2.0**-7) * 2.0**127, "fp32": (2 - 2.0**-23) * 2.0**127}  # the largest value


@dataclass(frozen=True)
class Peak:
    """max |x| of a layer's input and output; inf or NaN where it overflowed."""

    input: float
    output: float

    def widened(self, other: Peak) -> Peak:
        """Return the larger of both, for input and output; NaN where either is NaN."""
        return Peak(_larger(self.input, other.input), _larger(self.output, other.output))


def relevant_peak(name: str, peak: Peak, blocks: Collection[str]) -> float:
    """Return the max |x| that counts: the output's for a block; the larger of input and output for a layer."""
    return peak.output if name in blocks else _larger(peak.input, peak.output)


@dataclass(frozen=True)
class OverflowDiagnosis:
    """Why a call failed."""

    reason: str
    module: str = ""  # the first module that exceeds the range; "" if none was found
    peak: float | None = None  # its max |x| in fp32, if measured
    located: bool = True  # whether the place is known
    quantised: str = ""  # a quantised layer that fails although its input is finite
    fp16_accumulation: bool = False  # it accumulated in fp16, which may be the reason


def diagnose_from_fp32_peaks(
    peaks: Mapping[str, Peak], blocks: Collection[str], dtype: str
) -> OverflowDiagnosis | None:
    """Diagnose an overflow of `dtype` from the peaks of layers and blocks in fp32; None if no peak exceeds the range.

    peaks: in the order in which layers ran.
    blocks: names of blocks among them, of which only the output counts.
    """
    limit, here = RANGE[dtype], Message("{}'s {:.5g}", dtype, RANGE[dtype])
    beyond = {name: value for name in peaks if not (value := relevant_peak(name, peaks[name], blocks)) <= limit}
    if not beyond:
        return None
    first = next(iter(beyond))
    name = next((name for name in beyond if name in blocks), first)
    reason = Message("'{}' reaches {:.3g}, beyond {}", name, beyond[name], here)
    if name in blocks:
        reason = Message("'{}' outputs {:.3g}, beyond {}: the layers after it cannot take it", name, beyond[name], here)
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
    """Diagnose a call that fails in half precision although no peak exceeds the dtype's range in fp32.

    name: the first module with a non-finite output in a repeated half-precision call; None if it did not fail again.
    quantised: the call's quantised layers.
    all_layers_scaled: the call scaled every layer.
    fp16_accumulation: its products accumulated in fp16.
    """
    if name is None:
        reason = Message("no layer's output exceeds {}'s range, and the repeated call did not fail", dtype)
        return OverflowDiagnosis(reason, located=False)
    peak = peaks[name].output if name in peaks else None
    if fp16_accumulation:
        reason = Message("'{}' overflows with fp16 accumulation, although its output is in range", name)
        return OverflowDiagnosis(reason, name, peak, fp16_accumulation=True)
    if name in quantised:
        reason = Message("'{}' gives NaN or infinity when quantised, although its input is finite", name)
        return OverflowDiagnosis(reason, name, peak, quantised=name)
    inside = Message("inside '{}'", name) if name else Message("outside of all layers")
    inside = Message("inside attention") if "attn" in name or "attention" in name else inside
    reason = Message("'{}'", name) if name else Message("the output")
    reason += Message(
        " gives NaN or infinity in {}, although all layers' outputs are in range: it overflows {}", dtype, inside
    )
    if all_layers_scaled:
        reason = Message("values differ too much in size, or are too large, for products in {}, {}", dtype, inside)
    return OverflowDiagnosis(reason, name, peak)


def escalate_overrides(learned: PrecisionOverrides, finding: OverflowDiagnosis) -> tuple[PrecisionOverrides, str]:
    """Return the overrides after a failure, and the change in words; "" if there is none.

    Overflow protection is tried before the rest of the run goes to fp32.
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


logger = logging.getLogger(__name__)

FORMAT = 3
_KIND = "onediff-guard profile"
_MAX_BYTES = 2**20
_AGAIN = "Delete it: the next run creates a new one. Or import a complete one."


class BadProfile(Told, ValueError):
    """A profile cannot be used."""


class NewerProfile(BadProfile):
    """A newer version of this pack has saved it."""


@dataclass(frozen=True)
class Profile:
    """Precision overrides, and the setup that they were learned in: weights (by fingerprint), LoRAs, architecture,
    dtype and package versions. It can be shared like a workflow. In another setup it is ignored."""

    model: str  # its folder, file or hub id, for messages
    weights: str  # fingerprint of the denoiser's safetensors files
    loras: tuple[str, ...]  # fingerprint and scale of each
    architecture: str  # "sm75"
    dtype: str
    versions: Mapping[str, str]  # package → major.minor
    learned: PrecisionOverrides = NOTHING

    @property
    def name(self) -> str:
        """Return the name of its file, without ".json": the same for the same model, LoRAs, architecture and dtype."""
        facts = json.dumps([self.weights, self.loras, self.architecture, self.dtype])
        sizes = ((self.model, 160), (self.architecture, 32), (self.dtype, 32))  # in bytes: a file's name holds 255
        words = (for_file_name(text, limit=limit) for text, limit in sizes)
        return f"{'-'.join(words)}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def text(self) -> str:
        """Return the profile as JSON, for a file or for a node's input."""
        facts = {"kind": _KIND, "format": FORMAT, **asdict(self)}
        facts["learned"] = {name: facts["learned"][name] for name in _LearnedPart.model_fields}
        if not self.learned.unquantised:  # older versions of this pack do not know the key
            del facts["learned"]["unquantised"]
        if self.learned.fp16_error is None:
            del facts["learned"]["fp16_error"]
        return json.dumps(facts, indent=2, allow_nan=False) + "\n"

    def in_words(self) -> str:
        known = self.learned
        of = Message("{}, {}, {}", self.model, self.architecture, self.dtype)
        parts = [of + (Message(", with LoRA") if self.loras else ""), *known.in_words()]
        if known.fp16_error is not None:
            parts.append(Message("fp16 accumulation: {}", fp16_accumulation_in_words(known.fp16_error)))
        return joined("; ", parts) if len(parts) > 1 else Message("{}; nothing needs protection", parts[0])

    def misfit(self, here: Profile) -> str:
        """Return why it cannot be used in the setup `here`; "" if it can."""
        if self.weights != here.weights:
            return Message("it belongs to another model's weights")
        if self.loras != here.loras:
            return Message("it was made with other LoRAs or strengths")
        for what in ("architecture", "dtype"):
            if getattr(self, what) != getattr(here, what):
                return Message("it is for {}, but this is {}", getattr(self, what), getattr(here, what))
        for package, version in here.versions.items():
            if (its := self.versions.get(package, "of an unknown version")) != version:
                return Message("it was made with {} {}, but this is {}", package, its, version)
        return ""


def _one_line(text: str) -> str:
    """Return the text. Raises ValueError if it has control characters. (`isprintable` would also refuse joiners, and
    characters newer than this Python's Unicode.)"""
    if text.split("\n") != [for_terminal(text)] or "\t" in text:
        raise ValueError("a control character")
    return text


def _architecture(text: str) -> str:
    if not is_name(text):
        raise ValueError("not a known architecture")
    return text


_Text = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_one_line)]


class _LearnedPart(Foreign):
    """The overrides of a profile. `whole_run_fp32` is not among them: it concerns one run."""

    all_layers_scaled: bool = False
    unquantised: Annotated[list[_Text], Field(max_length=1000)] = []
    fp16_error: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None


class _ProfileJson(Foreign):
    """A profile as JSON."""

    kind: Literal["onediff-guard profile"]
    format: Literal[3]
    model: _Text
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    loras: Annotated[list[_Text], Field(max_length=100)]
    architecture: Annotated[str, Field(max_length=32), AfterValidator(_architecture)]
    dtype: Literal["fp16", "bf16", "fp8", "int8"]
    versions: Annotated[dict[_Text, _Text], Field(max_length=20)]
    learned: _LearnedPart


def read(file: Path) -> Profile:
    """Read a profile. Raises BadProfile."""
    where = shown(file.name, 100)
    try:
        if not file.is_file():  # opening a named pipe would wait for a writer
            raise BadProfile("The profile '{}' cannot be read: there is no such file. {}", where, _AGAIN)
        return _fitting(foreign.read(file, limit=_MAX_BYTES), where)
    except Unreadable as error:
        raise _bad(where, error) from None
    except OSError as error:
        raise BadProfile("The profile '{}' cannot be read: {}. {}", where, error.strerror or error, _AGAIN) from None


def parse(text: str, where: str) -> Profile:
    """Parse a profile's JSON. where: its name in messages. Raises BadProfile."""
    try:
        if len(text) > _MAX_BYTES:
            raise Unreadable(f"it is longer than {_MAX_BYTES:,} characters")
        return _fitting(foreign.parse(text), where)
    except Unreadable as error:
        raise _bad(where, error) from None


def _fitting(value: Any, where: str) -> Profile:
    saved = value.get("format") if isinstance(value, dict) and value.get("kind") == _KIND else None
    if type(saved) is int and saved > FORMAT:
        raise NewerProfile(
            "A newer version of this pack has saved the profile '{}' (format {} instead of {}). Update this pack, or "
            "delete the profile.",
            *(where, saved, FORMAT),
        )
    facts = foreign.fitting(_ProfileJson, value)
    given = facts.model_dump(exclude={"kind", "format", "learned", "loras"})
    learned: dict[str, Any] = facts.learned.model_dump() | {"unquantised": tuple(facts.learned.unquantised)}
    return Profile(**given, loras=tuple(facts.loras), learned=PrecisionOverrides(**learned))


def _bad(where: str, found: Unreadable) -> BadProfile:
    return BadProfile("'{}' cannot be used as a profile: {}. {}", where, found, _AGAIN)


def write(folder: Path, profile: Profile) -> Path:
    """Write a profile into the folder, atomically, and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(folder / f"{profile.name}.json", profile.text().encode())


def read_all(folder: Path) -> Iterator[tuple[Path, Profile | BadProfile]]:
    """Yield each profile of a folder with its path, by name; for one that cannot be used, the error."""
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            found = read(file)
        except BadProfile as error:
            found = error
        yield file, found


@dataclass(frozen=True)
class ProfileFile:
    """The profile of one model, card and dtype, on disk or given by the user."""

    here: Profile  # of this setup, with no overrides
    folder: Path | None  # of profiles; None: none are kept
    given: Profile | None = None  # by the user; used instead of the one on disk

    def load(self) -> tuple[PrecisionOverrides, tuple[str, ...]]:
        """Return the profile's overrides, and lines for the report: the overrides, or why the profile is ignored."""
        try:
            found = self.given or self._on_disk()
        except BadProfile as error:
            return NOTHING, (message_of(error),)
        if found is None:
            return NOTHING, ()
        if misfit := found.misfit(self.here):
            which = Message("the given profile") if self.given else Message("the profile {}", self.here.name)
            return NOTHING, (Message("{} is not used: {}", which, misfit),)
        return found.learned, (Message("from a profile: {}", found.in_words()),)

    def save(self, learned: PrecisionOverrides) -> None:
        """Write the overrides, unless the profile given or on disk has them already, or is of a newer version of this
        pack. Errors of the disk are logged."""
        profile, given = replace(self.here, learned=learned.to_share), self.given
        is_given = given is not None and given.learned == profile.learned and not given.misfit(profile)
        if self.folder is None or is_given:
            return
        try:
            try:
                found = self._on_disk()
                if found and found.learned == profile.learned and not found.misfit(profile):
                    return
            except NewerProfile:
                return
            except BadProfile:
                pass  # it is replaced
            logger.info("saved a profile: %s", write(self.folder, profile))
        except OSError as error:
            logger.warning("The profile %s could not be saved in %s: %s", profile.name, self.folder, error)

    def _on_disk(self) -> Profile | None:
        """Return this setup's profile; if there is none, one of the same weights under another model name."""
        if self.folder is None or not self.folder.is_dir():
            return None
        own, facts = self.folder / f"{self.here.name}.json", self.here.name.rpartition("-")[2]
        found = next((file for file in (own, *sorted(self.folder.glob(f"*-{facts}.json"))) if file.is_file()), None)
        return read(found) if found else None
