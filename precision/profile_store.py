"""What runs taught about a model, kept as JSON: later runs start from it, and it can be shared like a workflow.

A profile belongs to a model by a fingerprint of its weights, to its LoRAs, an architecture, a dtype, and the versions
that computed it. One that does not fit is left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..trust import foreign
from ..trust.atomic_files import replacing
from ..trust.foreign import Foreign, Unreadable
from ..trust.message import Message, Told, joined, message_of
from ..trust.text import for_file_name, for_terminal, shown
from .arch import is_name
from .overrides import NOTHING, PrecisionOverrides, fp16_accumulation_in_words

logger = logging.getLogger(__name__)

FORMAT = 3
_KIND = "onediff-guard profile"
_MAX_BYTES = 2**20
_AGAIN = "Delete it, and a run will make it anew; or import a whole one."


class BadProfile(Told, ValueError):
    """A profile of what was learned that cannot be used."""


@dataclass(frozen=True)
class Profile:
    """What was learned, and of what."""

    model: str  # for people: its folder, file or hub id
    weights: str  # fingerprint of the denoiser's safetensors files
    loras: tuple[str, ...]  # fingerprint and scale of each
    architecture: str  # "sm75"
    dtype: str
    versions: Mapping[str, str]  # package → major.minor
    learned: PrecisionOverrides = NOTHING

    @property
    def name(self) -> str:
        """The name of its file: the same for the same model, LoRAs, architecture and dtype."""
        facts = json.dumps([self.weights, self.loras, self.architecture, self.dtype])
        sizes = ((self.model, 160), (self.architecture, 32), (self.dtype, 32))  # in bytes: a file's name takes 255
        words = (for_file_name(text, limit=limit) for text, limit in sizes)
        return f"{'-'.join(words)}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def text(self) -> str:
        """The profile as JSON, for a file or for a node's input."""
        facts = {"kind": _KIND, "format": FORMAT, **asdict(self)}
        facts["learned"] = {name: facts["learned"][name] for name in _LearnedPart.model_fields}
        if not self.learned.unquantised:  # of a run that quantises nothing, which readers before it know
            del facts["learned"]["unquantised"]
        if self.learned.fp16_error is None:
            del facts["learned"]["fp16_error"]
        return json.dumps(facts, indent=2, allow_nan=False) + "\n"

    def in_words(self) -> str:
        known = self.learned
        parts = [
            Message("{}, {}, {}", self.model, self.architecture, self.dtype)
            + (Message(", with LoRA") if self.loras else "")
        ]
        parts += known.in_words()
        if known.fp16_error is not None:
            parts.append(Message("fp16 accumulation: {}", fp16_accumulation_in_words(known.fp16_error)))
        return joined("; ", parts) if len(parts) > 1 else Message("{}; nothing needs protection", parts[0])

    def misfit(self, here: Profile) -> str:
        """Why it cannot be used `here`, "" where it can."""
        if self.weights != here.weights:
            return Message("it is of another model's weights")
        if self.loras != here.loras:
            return Message("it was made with other LoRAs, or other strengths")
        for what in ("architecture", "dtype"):
            if getattr(self, what) != getattr(here, what):
                return Message("it is for {}, and this is {}", getattr(self, what), getattr(here, what))
        for package, version in here.versions.items():
            if self.versions.get(package) != version:
                return Message(
                    "it was made with {} {}, and this is {}",
                    package,
                    self.versions.get(package, "of no version"),
                    version,
                )
        return ""


def _one_line(text: str) -> str:
    """Not `isprintable`, which refuses what joins letters, and what this Python's Unicode does not know yet."""
    if text.split("\n") != [for_terminal(text)] or "\t" in text:
        raise ValueError("a control character")
    return text


def _architecture(text: str) -> str:
    if not is_name(text):
        raise ValueError("the name of no architecture")
    return text


_Text = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_one_line)]


class _LearnedPart(Foreign):
    """That a run went on in fp32 is of that run alone, and not here."""

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
    """Raises BadProfile."""
    where = shown(file.name, 100)
    try:
        if not file.is_file():  # opening a pipe waits for whoever writes into it
            raise BadProfile("The profile '{}' cannot be read: there is no such file. {}", where, _AGAIN)
        return _fitting(foreign.read(file, limit=_MAX_BYTES))
    except Unreadable as error:
        raise _bad(where, error) from None
    except OSError as error:
        raise BadProfile("The profile '{}' cannot be read: {}. {}", where, error.strerror or error, _AGAIN) from None


def parse(text: str, where: str) -> Profile:
    """A profile from its JSON. where: what to call it in messages. Raises BadProfile."""
    try:
        if len(text) > _MAX_BYTES:
            raise Unreadable(f"it is longer than {_MAX_BYTES:,} characters")
        return _fitting(foreign.parse(text))
    except Unreadable as error:
        raise _bad(where, error) from None


def _fitting(value: Any) -> Profile:
    facts = foreign.fitting(_ProfileJson, value)
    given = facts.model_dump(exclude={"kind", "format", "learned", "loras"})
    learned = facts.learned
    known = PrecisionOverrides(
        all_layers_scaled=learned.all_layers_scaled,
        unquantised=tuple(learned.unquantised),
        fp16_error=learned.fp16_error,
    )
    return Profile(**given, loras=tuple(facts.loras), learned=known)


def _bad(where: str, found: Unreadable) -> BadProfile:
    return BadProfile("'{}' is no profile that can be used: {}. {}", where, found, _AGAIN)


def write(folder: Path, profile: Profile) -> Path:
    """Into the folder, whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_text(folder / f"{profile.name}.json", profile.text())


def write_text(file: Path, text: str) -> Path:
    """Whole or not at all. Raises OSError."""
    with replacing(file) as stream:
        stream.write(text.encode())
    return file


def read_all(folder: Path) -> Iterator[tuple[Path, Profile | BadProfile]]:
    """Every profile of a folder, by name; in place of one that cannot be used, why."""
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        yield file, _read_or_why_not(file)


def _read_or_why_not(file: Path) -> Profile | BadProfile:
    try:
        return read(file)
    except BadProfile as error:
        return error


@dataclass(frozen=True)
class ProfileFile:
    """The profile of one model, card and dtype, on disk or given by the user."""

    here: Profile  # while nothing is known
    folder: Path | None  # in which profiles are kept; None: nowhere
    given: Profile | None = None  # by the user, in place of a kept one

    def load(self) -> tuple[PrecisionOverrides, tuple[str, ...]]:
        """What a profile says, and lines for the report: what it brought, or why it was left alone."""
        try:
            found = self.given or self._on_disk()
        except BadProfile as error:
            return NOTHING, (message_of(error),)
        if found is None:
            return NOTHING, ()
        if misfit := found.misfit(self.here):
            which = Message("the profile that was given") if self.given else Message("the profile {}", self.here.name)
            return NOTHING, (Message("{} is left alone: {}", which, misfit),)
        return found.learned, (Message("from a profile: {}", found.in_words()),)

    def save(self, learned: PrecisionOverrides) -> None:
        """Write it, unless the given profile or the kept one says it. A disk that refuses is logged."""
        profile = replace(self.here, learned=learned.to_share)
        if self.folder is None or self._is_given(profile):
            return
        try:
            with suppress(BadProfile):
                if self._on_disk() == profile:
                    return
            logger.info("keeping a profile: %s", write(self.folder, profile))
        except OSError as error:
            logger.warning("The profile %s could not be kept in %s: %s", profile.name, self.folder, error)

    def _is_given(self, profile: Profile) -> bool:
        given = self.given
        return given is not None and given.learned == profile.learned and not given.misfit(profile)

    def _on_disk(self) -> Profile | None:
        file = self.folder and self.folder / f"{self.here.name}.json"
        return read(file) if file and file.is_file() else None
