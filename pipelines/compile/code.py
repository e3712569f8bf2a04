"""Compiled code as one file: what it is for, and all that inductor and Triton wrote, each with its SHA-256.

One file, so that it is there whole or not at all, two processes cannot mix theirs, and it can be handed on as it is.
`torch.compiler.save_cache_artifacts` would make one too, but without the libraries that the C++ compiler built: on a
CPU, a process that loads it builds them all again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from ...trust.foreign import Foreign, Unreadable, parse_as
from ...trust.paths import Outside, inside, relative
from ...trust.text import for_file_name, shown
from ..atomic_files import replacing
from ..errors import BadCompiled

FORMAT = 1
SUFFIX = ".compiled.zip"
_KIND = "onediff-guard compiled code"
_MANIFEST = "manifest.json"
_MAX_BYTES = 8 * 2**30  # unpacked; more is no compiled code
_MAX_LISTED = 16 * 2**20  # of names, sizes and hashes
_PIECE = 2**20
_ENCRYPTED = 1  # of a file's flags
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
        words = (for_file_name(text, limit=60) for text in (self.model, self.machine.architecture, self.dtype))
        return f"{'-'.join(words)}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

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
            _copy(archive, name, digest, file, None)
        return target


def unpack(file: Path, target: Target, folder: Path) -> None:
    """Put its code into `folder`, but for what is there already. Raises BadCompiled, OSError."""
    with _opened(file) as archive:
        found, digests = _manifest(archive, file)
        if found != target:
            raise BadCompiled(f"'{file.name}' is for something else: {found.in_words()}. {_AGAIN}")
        for name, digest in digests.items():
            path = inside(folder, name)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as stream:
                _copy(archive, name, digest, file, stream)
            if _names_paths(name):
                path.write_bytes(path.read_bytes().replace(_HERE, _as_json(folder)))


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
    if file.exists() and not file.is_file():  # opening a pipe waits for whoever writes into it
        raise _bad(file, "it is no file")
    try:
        with file.open("rb") as stream:
            if _bytes_listed(stream) > _MAX_LISTED:
                raise _bad(file, f"it lists its files in more than {_MAX_LISTED:,} bytes")
            with zipfile.ZipFile(stream) as archive:
                yield archive
    except (BadCompiled, Outside, *_DAMAGED) as error:
        raise error if isinstance(error, BadCompiled) else _bad(file, error) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the file's beginning
            raise
        raise _bad(file, error) from None


def _bytes_listed(stream: BinaryIO) -> int:
    """How much zipfile will read, and hold many times over, to list an archive's files."""
    ends: Any = zipfile._EndRecData(stream)  # pyright: ignore[reportAttributeAccessIssue]
    stream.seek(0)
    return ends[zipfile._ECD_SIZE] if ends else 0  # pyright: ignore[reportAttributeAccessIssue]


def _bad(file: Path, found: object) -> BadCompiled:
    return BadCompiled(f"'{shown(file.name, 100)}' is no compiled code that can be used: {found}. {_AGAIN}")


_Text = Annotated[str, Field(max_length=1000)]


class _Platform(Foreign):
    architecture: _Text
    device: _Text
    torch: _Text
    triton: _Text
    python: _Text
    system: _Text


class _Target(Foreign):
    model: _Text
    config: _Text
    dtype: _Text
    plan: _Text
    machine: _Platform


class _Manifest(Foreign):
    kind: Literal["onediff-guard compiled code"]
    format: Literal[1]
    target: _Target = Field(alias="for")
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


def _manifest(archive: zipfile.ZipFile, file: Path) -> tuple[Target, dict[str, str]]:
    """What the code is for, and {path: SHA-256} of its files."""
    infos = {info.filename: info for info in archive.infolist()}
    if _MANIFEST not in infos:
        raise _bad(file, f"it has no {_MANIFEST}")
    if sum(info.file_size for info in infos.values()) > _MAX_BYTES:
        raise _bad(file, f"it unpacks to more than {_MAX_BYTES:,} bytes")
    for info in infos.values():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & _ENCRYPTED:
            raise _bad(file, f"its file '{shown(info.filename)}' is encrypted, or compressed in another way")
    with archive.open(_MANIFEST) as stream:
        text = stream.read(_MAX_LISTED + 1)
    if len(text) > _MAX_LISTED:
        raise _bad(file, f"its {_MANIFEST} is longer than {_MAX_LISTED:,} bytes")
    try:
        facts = parse_as(_Manifest, text)
    except Unreadable as error:
        raise _bad(file, f"its {_MANIFEST} cannot be used: {error}") from None
    names = {_MANIFEST, *facts.files}
    if len(names) != 1 + len(facts.files) or names != set(infos) or len(infos) != len(archive.infolist()):
        raise _bad(file, f"its files are not those that its {_MANIFEST} names")
    folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
    if len({name.casefold() for name in names}) != len(names) or folders & names:
        raise _bad(file, "two of its files would be one")
    for name in facts.files:
        if relative(name).as_posix() != name or ":" in name:
            raise _bad(file, f"its file '{shown(name)}' would be elsewhere")
    given, machine = facts.target.model_dump(exclude={"machine"}), facts.target.machine.model_dump()
    return Target(**given, machine=Platform(**machine)), facts.files


def _copy(archive: zipfile.ZipFile, name: str, digest: str, file: Path, to: BinaryIO | None) -> None:
    """Read one of its files in pieces, and write it where `to` is given. Raises BadCompiled where it is damaged."""
    found = hashlib.sha256()
    with archive.open(name) as stream:
        while piece := stream.read(_PIECE):
            found.update(piece)
            if to:
                to.write(piece)
    if found.hexdigest() != digest:
        raise BadCompiled(f"'{file.name}' is damaged: its file '{shown(name)}' is not what it was. {_AGAIN}")


def _names_paths(name: str) -> bool:
    return name.startswith(f"{_TRITON}/") and name.endswith(".json")


def _as_json(folder: Path) -> bytes:
    return json.dumps(str(folder))[1:-1].encode()
