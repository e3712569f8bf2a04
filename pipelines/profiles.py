"""What runs taught about a model, kept as JSON: later runs start from it, and it can be shared like a workflow.

A profile belongs to a model by its denoiser's config, safetensors headers, sizes and a sample of the weights (not by a
hash of 11 GB; headers alone would not tell a fine-tune from its base), to its LoRAs, an architecture, a dtype, and the
versions that computed it. One that does not fit is left alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..precision.learned import NOTHING, Learned, named
from .errors import BadProfile
from .keeping import replacing
from .stored import StoredModel

if TYPE_CHECKING:
    from .lora import Lora

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
        """Of its file: the same for the same model, LoRAs, architecture and dtype."""
        facts = json.dumps([self.weights, self.loras, self.architecture, self.dtype])
        model = re.sub(r"[^\w.-]+", "-", self.model).strip("-.") or "model"
        return f"{model}-{self.architecture}-{self.dtype}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def text(self) -> str:
        """As JSON, for a file or for a node's input."""
        facts = {"kind": _KIND, "format": FORMAT, **asdict(self)}
        facts["learned"] = {name: facts["learned"][name] for name in _LEARNED}
        return json.dumps(facts, indent=2, allow_nan=False) + "\n"

    def in_words(self) -> str:
        known = self.learned
        parts = [f"{self.model}, {self.architecture}, {self.dtype}" + (", with LoRA" if self.loras else "")]
        parts += [f"residual stream peaks at {known.stream_peak:.4g}"] if known.stream_peak is not None else []
        parts += [f"{named(known.islands)} in fp32"] if known.islands else []
        return "; ".join(parts) if len(parts) > 1 else f"{parts[0]}; nothing learned"

    def misfit(self, here: Profile, modules: Iterable[str]) -> str:
        """Why it cannot be used `here`, "" where it can. modules: names in the denoiser."""
        if self.weights != here.weights:
            return "it is of another model's weights"
        if self.loras != here.loras:
            return "it was made with other LoRAs, or other strengths"
        for what in ("architecture", "dtype"):
            if getattr(self, what) != getattr(here, what):
                return f"it is for {getattr(self, what)}, and this is {getattr(here, what)}"
        for package, version in here.versions.items():
            if self.versions.get(package) != version:
                return (
                    f"it was made with {package} {self.versions.get(package, 'of no version')}, and this is {version}"
                )
        unknown = sorted(set(self.learned.islands) - set(modules))
        return f"this model has no {named(tuple(unknown))}" if unknown else ""


def identify(model: StoredModel, loras: Sequence[Lora], architecture: str, dtype: str) -> Profile:
    """The profile of a run of which nothing is known yet."""
    import diffusers
    import torch

    versions = {package.__name__: ".".join(package.__version__.split(".")[:2]) for package in (torch, diffusers)}
    return Profile(
        model=model.name,
        weights=_fingerprint(model.weights[model.family.denoiser].files, model.denoiser_config),
        loras=tuple(f"{_fingerprint([lora.path])} at {lora.scale:g}" for lora in loras if lora.scale),
        architecture=architecture,
        dtype=dtype,
        versions=versions,
    )


def read(file: Path) -> Profile:
    """Raises BadProfile."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise BadProfile(f"'{file.name}' is no profile: it has {file.stat().st_size:,} bytes. {_AGAIN}")
        return parse(file.read_text(encoding="utf-8"), file.name)
    except (OSError, UnicodeDecodeError) as error:
        raise BadProfile(f"The profile '{file.name}' cannot be read: {error}. {_AGAIN}") from None


def parse(text: str, where: str) -> Profile:
    """A profile from its JSON. where: what to call it in messages. Raises BadProfile."""

    def bad(found: str) -> BadProfile:
        return BadProfile(f"'{where}' is no profile that can be used: {found}. {_AGAIN}")

    try:
        facts = json.loads(text)
    except ValueError as error:
        raise bad(f"it is not JSON ({error})") from None
    if not isinstance(facts, dict) or facts.get("kind") != _KIND:
        raise bad(f"its 'kind' is not '{_KIND}'")
    if facts.get("format") != FORMAT:
        raise bad(f"its format is {facts.get('format')!r}, and this version reads {FORMAT}")
    learned = facts.get("learned")
    if not isinstance(learned, dict):
        raise bad("it has no 'learned'")
    for field, holds in _FIELDS.items():
        if not holds(facts.get(field)):
            raise bad(f"its '{field}' is {str(facts.get(field))[:60]!r}")
    for field, holds in _LEARNED.items():
        if not holds(learned.get(field)):
            raise bad(f"its 'learned.{field}' is {str(learned.get(field))[:60]!r}")
    known = Learned(learned["stream_peak"], tuple(learned["islands"]))
    given: dict[str, Any] = {field: facts[field] for field in _FIELDS} | {"loras": tuple(facts["loras"])}
    return Profile(**given, learned=known)


def write(folder: Path, profile: Profile) -> Path:
    """Into the folder, whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_text(folder / f"{profile.name}.json", profile.text())


def write_text(file: Path, text: str) -> Path:
    """Whole or not at all. Raises OSError."""
    with replacing(file) as stream:
        stream.write(text.encode())
    return file


def kept(folder: Path) -> Iterator[tuple[Path, Profile | BadProfile]]:
    """Every profile of a folder, by name; in place of one that cannot be used, why."""
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        yield file, _read_or_why_not(file)


def _read_or_why_not(file: Path) -> Profile | BadProfile:
    try:
        return read(file)
    except BadProfile as error:
        return error


def _fingerprint(files: Iterable[Path], config: Mapping[str, Any] | None = None) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            digest.update(prefix + stream.read(struct.unpack("<Q", prefix)[0]))
            start = stream.tell()
            for sample in range(_SAMPLES):
                stream.seek(start + (size - start) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
        digest.update(f":{size};".encode())
    return digest.hexdigest()[:32]


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


_FIELDS = {
    "model": _text,
    "weights": _text,
    "loras": _texts,
    "architecture": _text,
    "dtype": lambda value: value in ("fp16", "bf16"),
    "versions": lambda value: isinstance(value, dict) and _texts([*value, *value.values()]),
}
_LEARNED = {  # that a run went on in fp32 is of that run alone
    "stream_peak": lambda value: value is None or _positive(value),
    "islands": _texts,
}
