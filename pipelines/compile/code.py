"""Compiled code as one file: what it is for, and all that inductor and Triton wrote, each with its SHA-256.

One file, so that it is there whole or not at all, two processes cannot mix theirs, and it can be handed on as it is.
PyTorch's own ways do neither (docs/compile.md has the figures): `torch.compiler.save_cache_artifacts` leaves out the
libraries that the C++ compiler built, and a folder that is kept ends the process at a library that was cut short.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from ...trust.atomic_files import replacing
from ...trust.foreign import Foreign, Unreadable, parse_as
from ...trust.owners import why_unsafe
from ...trust.paths import inside, relative
from ...trust.text import shown
from ..errors import BadCompiled
from .target import Target

FORMAT = 1
SUFFIX = ".compiled.zip"
_KIND = "onediff-guard compiled code"
_MANIFEST = "manifest.json"
_MAX_BYTES = 8 * 2**30  # unpacked; more is no compiled code
_MAX_LISTED = 16 * 2**20  # of names, sizes and hashes
_PIECE = 2**20
_ENCRYPTED = 1  # of a file's flags
_AGAIN = "Delete it, and a run will compile anew; or import a whole one."
_LEFT_OUT = {"locks", "__pycache__"}  # folders that mean nothing to another process
_HERE = b"{ONEDIFF_GUARD_COMPILED}"  # stands for the folder in Triton's JSON, which names files by their whole path
# what zipfile raises at bytes that are no archive, or no longer one
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, RuntimeError, ValueError)


class _Manifest(Foreign):
    kind: Literal["onediff-guard compiled code"]
    format: Literal[1]
    target: Target = Field(alias="for")
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]  # path → SHA-256


def read_target(file: Path) -> Target:
    """What a file is for; its code is not looked at. Raises BadCompiled, OSError."""
    with _opened(file) as (_, manifest):
        return manifest.target


def check(file: Path) -> Target:
    """Read all of it. Raises BadCompiled, OSError."""
    with _opened(file) as (archive, manifest):
        for name, digest in manifest.files.items():
            _copy(archive, name, digest, file, None)
        return manifest.target


def unpack(file: Path, target: Target, folder: Path) -> None:
    """Put its code into `folder`, but for what is there already, to be run. Raises BadCompiled, also where another user
    could have written it, and OSError."""
    with _opened(file, to_run=True) as (archive, manifest):
        if manifest.target != target:
            raise BadCompiled("'{}' is for something else: {}. {}", file.name, manifest.target.in_words(), _AGAIN)
        for name, digest in manifest.files.items():
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
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path.stat().st_size
        for name, path in found.items()
        if not (path.name.startswith((".", "tmp")) or path.suffix in (".lock", ".tmp") or _LEFT_OUT & {*name.parts})
    }


@contextmanager
def _opened(file: Path, *, to_run: bool = False) -> Iterator[tuple[zipfile.ZipFile, _Manifest]]:
    """An archive that can be read, and what it says it holds. What is wrong with it is said of `file`."""
    try:
        if file.exists() and not file.is_file():  # opening a pipe waits for whoever writes into it
            raise ValueError("it is no file")
        with file.open("rb") as stream:
            if to_run and (why := why_unsafe(os.fstat(stream.fileno()))):
                raise ValueError(why)
            if _bytes_listed(stream) > _MAX_LISTED:
                raise ValueError(f"it lists its files in more than {_MAX_LISTED:,} bytes")
            with zipfile.ZipFile(stream) as archive:
                yield archive, _manifest(archive)
    except BadCompiled:
        raise
    except (OSError, *_DAMAGED) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # but for a place before the file's beginning
            raise
        raise BadCompiled(
            "'{}' is no compiled code that can be used: {}. {}", shown(file.name, 100), error, _AGAIN
        ) from None


def _bytes_listed(stream: BinaryIO) -> int:
    """How much zipfile will read, and hold many times over, to list an archive's files."""
    ends: Any = zipfile._EndRecData(stream)  # pyright: ignore[reportAttributeAccessIssue]
    stream.seek(0)
    return ends[zipfile._ECD_SIZE] if ends else 0  # pyright: ignore[reportAttributeAccessIssue]


def _manifest(archive: zipfile.ZipFile) -> _Manifest:
    """What an archive holds, where that is what it says. Raises ValueError, and what zipfile does."""
    infos = {info.filename: info for info in archive.infolist()}
    if _MANIFEST not in infos:
        raise ValueError(f"it has no {_MANIFEST}")
    if sum(info.file_size for info in infos.values()) > _MAX_BYTES:
        raise ValueError(f"it unpacks to more than {_MAX_BYTES:,} bytes")
    for info in infos.values():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & _ENCRYPTED:
            raise ValueError(f"its file '{shown(info.filename)}' is encrypted, or compressed in another way")
    with archive.open(_MANIFEST) as stream:
        text = stream.read(_MAX_LISTED + 1)
    if len(text) > _MAX_LISTED:
        raise ValueError(f"its {_MANIFEST} is longer than {_MAX_LISTED:,} bytes")
    try:
        manifest = parse_as(_Manifest, text)
    except Unreadable as error:
        raise ValueError(f"its {_MANIFEST} cannot be used: {error}") from None
    names = {_MANIFEST, *manifest.files}
    if len(names) != 1 + len(manifest.files) or names != set(infos) or len(infos) != len(archive.infolist()):
        raise ValueError(f"its files are not those that its {_MANIFEST} names")
    folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
    if len({name.casefold() for name in names}) != len(names) or folders & names:
        raise ValueError("two of its files would be one")
    for name in manifest.files:
        if relative(name).as_posix() != name or ":" in name:
            raise ValueError(f"its file '{shown(name)}' would be elsewhere")
    return manifest


def _copy(archive: zipfile.ZipFile, name: str, digest: str, file: Path, to: BinaryIO | None) -> None:
    """Read one of its files in pieces, and write it where `to` is given. Raises BadCompiled where it is damaged."""
    found = hashlib.sha256()
    with archive.open(name) as stream:
        while piece := stream.read(_PIECE):
            found.update(piece)
            if to:
                to.write(piece)
    if found.hexdigest() != digest:
        raise BadCompiled("'{}' is damaged: its file '{}' is not what it was. {}", file.name, shown(name), _AGAIN)


def _names_paths(name: str) -> bool:
    return name.startswith("triton/") and name.endswith(".json")


def _as_json(folder: Path) -> bytes:
    return json.dumps(str(folder))[1:-1].encode()
