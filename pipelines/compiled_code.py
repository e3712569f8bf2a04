"""Compiled code as one file: what it is for, and all that inductor and Triton wrote, each with its SHA-256.

One file, so that it is there whole or not at all, two processes cannot mix theirs, and it can be handed on as it is.
`torch.compiler.save_cache_artifacts` would make one too, but without the libraries that the C++ compiler built: on a
CPU, a process that loads it builds them all again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import BadCompiled
from .keeping import replacing

FORMAT = 1
SUFFIX = ".compiled.zip"
_KIND = "onediff-guard compiled code"
_MANIFEST = "manifest.json"
_MAX_BYTES = 8 * 2**30  # unpacked; more is no compiled code
_AGAIN = "Delete it, and a run will compile anew; or import a whole one."
_LEFT_OUT = ("locks", "__pycache__")  # folders that mean nothing to another process
_TRITON = "triton"
_HERE = b"{ONEDIFF_GUARD_COMPILED}"  # stands for the folder in Triton's JSON, which names files by their whole path


@dataclass(frozen=True)
class Platform:
    """What runs compiled code. Code for another may crash the process, so all of it must agree."""

    architecture: str  # "sm90", "cpu"
    device: str  # "NVIDIA H200"; a CPU by its name and a hash of its instruction sets
    torch: str
    triton: str  # "" where there is none, or none is needed
    python: str  # "cpython-311"
    system: str  # "Linux x86_64, glibc 2.36"

    def misfit(self, here: Platform) -> str:
        """Why it cannot be used `here`, "" where it can."""
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(here, field.name)
            if theirs != ours:
                return f"it is for {field.name} '{theirs}', and this is '{ours}'"
        return ""


@dataclass(frozen=True)
class Target:
    """What code was compiled for."""

    model: str  # the variant's name
    config: str  # hash of the denoiser's config
    dtype: str
    plan: str  # what else of the plan and the compile options the code hangs on
    machine: Platform

    @property
    def name(self) -> str:
        """Of its file, without the suffix."""
        facts = json.dumps(asdict(self), sort_keys=True)
        model = re.sub(r"[^\w.-]+", "-", self.model).strip("-.") or "model"
        digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
        return f"{model}-{self.machine.architecture}-{self.dtype}-{digest}"

    def in_words(self) -> str:
        machine = self.machine
        return f"{self.model}, {self.dtype}, {self.plan}; {machine.device}, torch {machine.torch}, {machine.python}"


def read_target(file: Path) -> Target:
    """What a file is for; its code is not looked at. Raises BadCompiled, OSError."""
    with _opened(file) as archive:
        return _manifest(archive, file)[0]


def check(file: Path) -> Target:
    """Read all of it. Raises BadCompiled, OSError."""
    with _opened(file) as archive:
        target, digests = _manifest(archive, file)
        for name, digest in digests.items():
            _read(archive, name, digest, file)
        return target


def unpack(file: Path, target: Target, folder: Path) -> None:
    """Put its code into `folder`, but for what is there already. Raises BadCompiled, OSError."""
    with _opened(file) as archive:
        found, digests = _manifest(archive, file)
        if found != target:
            raise BadCompiled(f"'{file.name}' is for something else: {found.in_words()}. {_AGAIN}")
        for name, digest in digests.items():
            content, path = _read(archive, name, digest, file), folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.replace(_HERE, _as_json(folder)) if _names_paths(name) else content)


def pack(folder: Path, target: Target, file: Path) -> None:
    """Write `file`, whole or not at all, of all code in `folder`. Raises OSError."""
    contents = {name: (folder / name).read_bytes() for name in files_in(folder)}
    for name in filter(_names_paths, contents):
        contents[name] = contents[name].replace(_as_json(folder), _HERE)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    facts = {"kind": _KIND, "format": FORMAT, "for": asdict(target), "files": digests}
    with replacing(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(_MANIFEST, json.dumps(facts, indent=2) + "\n")
        for name, content in contents.items():
            archive.writestr(name, content)


def copy(file: Path, to: Path) -> None:
    """Whole or not at all. Raises OSError."""
    with file.open("rb") as source, replacing(to) as stream:
        shutil.copyfileobj(source, stream)


def files_in(folder: Path) -> dict[str, int]:
    """{path in the folder, with /: bytes} of all that another process can use."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        unfinished = name.name.startswith((".", "tmp")) or name.suffix in (".lock", ".tmp")
        if not unfinished and not set(_LEFT_OUT) & set(name.parts) and path.is_file():
            found[name.as_posix()] = path.stat().st_size
    return found


# what zipfile raises at bytes that are no archive, or no longer one
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, RuntimeError, ValueError)


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except BadCompiled:
        raise
    except _DAMAGED as error:
        raise BadCompiled(f"'{file.name}' is no compiled code that can be used: {error}. {_AGAIN}") from None


def _manifest(archive: zipfile.ZipFile, file: Path) -> tuple[Target, dict[str, str]]:
    """What the code is for, and {path: SHA-256} of its files."""

    def bad(found: str) -> BadCompiled:
        return BadCompiled(f"'{file.name}' is no compiled code that can be used: {found}. {_AGAIN}")

    names = archive.namelist()
    if _MANIFEST not in names:
        raise bad(f"it has no {_MANIFEST}")
    if sum(info.file_size for info in archive.infolist()) > _MAX_BYTES:
        raise bad(f"it unpacks to more than {_MAX_BYTES:,} bytes")
    try:
        facts = json.loads(archive.read(_MANIFEST))
    except ValueError as error:
        raise bad(f"its {_MANIFEST} is not JSON ({error})") from None
    if not isinstance(facts, dict) or facts.get("kind") != _KIND:
        raise bad(f"its 'kind' is not '{_KIND}'")
    if facts.get("format") != FORMAT:
        raise bad(f"its format is {facts.get('format')!r}, and this version reads {FORMAT}")
    target, digests = _target(facts.get("for")), _texts(facts.get("files"))
    if target is None:
        raise bad("it does not say what it is for")
    if digests is None or sorted([_MANIFEST, *digests]) != sorted(names):
        raise bad(f"its files are not those that its {_MANIFEST} names")
    for name in digests:
        if not _stays_inside(name):
            raise bad(f"its file '{name}' would leave the folder")
    return target, digests


def _target(facts: Any) -> Target | None:
    try:
        machine = _texts(facts.pop("machine"))
        texts = _texts(facts)
        return None if machine is None or texts is None else Target(**texts, machine=Platform(**machine))
    except (AttributeError, KeyError, TypeError):
        return None


def _texts(value: Any) -> dict[str, str] | None:
    return value if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()) else None


def _stays_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return "/".join(parts) == name and ".." not in parts and not re.search(r"^/|[\\:\0]", name) and bool(parts)


def _read(archive: zipfile.ZipFile, name: str, digest: str, file: Path) -> bytes:
    content = archive.read(name)
    if hashlib.sha256(content).hexdigest() != digest:
        raise BadCompiled(f"'{file.name}' is damaged: its file '{name}' is not what it was. {_AGAIN}")
    return content


def _names_paths(name: str) -> bool:
    return name.startswith(f"{_TRITON}/") and name.endswith(".json")


def _as_json(folder: Path) -> bytes:
    return json.dumps(str(folder))[1:-1].encode()
