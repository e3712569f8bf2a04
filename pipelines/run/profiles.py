"""What runs taught about a model, kept as JSON: later runs start from it, and it can be shared like a workflow.

A profile belongs to a model by its denoiser's config, safetensors headers, sizes and a sample of the weights (not by a
hash of 11 GB; headers alone would not tell a fine-tune from its base), to its LoRAs, an architecture, a dtype, and the
versions that computed it. One that does not fit is left alone.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...precision.arch import is_name
from ...precision.learned import NOTHING, Learned, largest_of, parts_in_words
from ...precision.sums import Sums
from ...trust import foreign
from ...trust.atomic_files import replacing
from ...trust.foreign import Foreign, Unreadable
from ...trust.message import Message, joined
from ...trust.text import for_file_name, for_terminal, shown
from ..errors import BadProfile
from ..models.on_disk import StoredModel
from ..safetensors_header import header_text

if TYPE_CHECKING:
    from ..models.lora import Lora

FORMAT = 1
_KIND = "onediff-guard profile"
_MAX_BYTES = 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file's weights
_AGAIN = "Delete it, and a run will make it anew; or import a whole one."


@dataclass(frozen=True)
class Profile:
    """What was learned, and of what."""

    model: str  # for people: its folder, file or hub id
    weights: str  # fingerprint of the denoiser's safetensors files
    loras: tuple[str, ...]  # fingerprint and scale of each
    architecture: str  # "sm75"
    dtype: str
    versions: Mapping[str, str]  # package → major.minor
    learned: Learned = NOTHING

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
        if not self.learned.sums:
            del facts["learned"]["sums"]
        return json.dumps(facts, indent=2, allow_nan=False) + "\n"

    def in_words(self) -> str:
        known = self.learned
        parts = [
            Message("{}, {}, {}", self.model, self.architecture, self.dtype)
            + (Message(", with LoRA") if self.loras else "")
        ]
        parts += known.in_words()
        parts += [Message("fp16 accumulation: {}", known.sums)] if known.sums else []
        return joined("; ", parts) if len(parts) > 1 else Message("{}; nothing learned", parts[0])

    def misfit(self, here: Profile, parts: Iterable[str]) -> str:
        """Why it cannot be used `here`, "" where it can. parts: of the denoiser, those that may run in fp32, or
        wide."""
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
        unknown = sorted(set(self.learned.parts) - set(parts))
        return Message("this model has no part {}", parts_in_words(tuple(unknown))) if unknown else ""


def _one_line(text: str) -> str:
    """Not `isprintable`, which refuses what joins letters, and what this Python's Unicode does not know yet."""
    if text.split("\n") != [for_terminal(text)] or "\t" in text:
        raise ValueError("a control character")
    return text


def _architecture(text: str) -> str:
    if not is_name(text):
        raise ValueError("the name of no architecture")
    return text


def _apart(islands: list[str]) -> list[str]:
    if list(largest_of(islands)) != islands:
        raise ValueError("one of these parts is in another, or stands here twice")
    return islands


_Text = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_one_line)]


_Layers = Annotated[list[_Text], Field(max_length=5000)]
_Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _SumsPart(Foreign):
    """Which linear layers accumulate in fp16."""

    layers: _Layers
    islands: _Layers
    overflows: _Layers
    largest: _Error
    farthest: Annotated[str, Field(max_length=300), AfterValidator(_one_line)]
    step: _Error


class _LearnedPart(Foreign):
    """That a run went on in fp32 is of that run alone, and not here. Older profiles have a `stream_peak`, too, which
    nothing needs any more."""

    islands: Annotated[list[_Text], Field(max_length=200), AfterValidator(_apart)]
    wide_parts: Annotated[list[_Text], Field(max_length=200), AfterValidator(_apart)] = []
    everything: bool = False
    unquantised: Annotated[list[_Text], Field(max_length=1000)] = []
    sums: _SumsPart | None = None


class _File(Foreign):
    """A profile as JSON."""

    kind: Literal["onediff-guard profile"]
    format: Literal[1]
    model: _Text
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    loras: Annotated[list[_Text], Field(max_length=100)]
    architecture: Annotated[str, Field(max_length=32), AfterValidator(_architecture)]
    dtype: Literal["fp16", "bf16", "fp8", "int8"]
    versions: Annotated[dict[_Text, _Text], Field(max_length=20)]
    learned: _LearnedPart


def identify(model: StoredModel, denoiser: str, loras: Sequence[Lora], architecture: str, dtype: str) -> Profile:
    """The profile of a run of which nothing is known yet. denoiser: the component, which the LoRAs are added to."""
    import diffusers
    import torch

    versions = {package.__name__: ".".join(package.__version__.split(".")[:2]) for package in (torch, diffusers)}
    return Profile(
        model=shown(model.name, 300),
        weights=fingerprint(model.weights[denoiser].files, model.denoiser_config),
        loras=tuple(f"{fingerprint([lora.path], lora.beside)} at {lora.scale:g}" for lora in loras if lora.scale),
        architecture=architecture,
        dtype=dtype,
        versions=versions,
    )


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
    facts = foreign.fitting(_File, value)
    given = facts.model_dump(exclude={"kind", "format", "learned", "loras"})
    learned = facts.learned
    lists: dict[str, Any] = {name: tuple(getattr(learned, name)) for name in ("islands", "wide_parts", "unquantised")}
    sums = Sums(**{name: _plain(value) for name, value in learned.sums}) if learned.sums else None
    known = Learned(**lists, everything=learned.everything, sums=sums)
    return Profile(**given, loras=tuple(facts.loras), learned=known)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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


def fingerprint(files: Iterable[Path], config: Mapping[str, Any] | None = None) -> str:
    """Return 32 hexadecimal digits that tell safetensors files, and a config, from others."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in files:
        size = file.stat().st_size
        header = header_text(file)
        digest.update(struct.pack("<Q", len(header)) + header)
        start = 8 + len(header)
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(start + (size - start) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
        digest.update(f":{size};".encode())
    return digest.hexdigest()[:32]
