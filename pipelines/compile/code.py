"""A file of compiled code: one line of JSON, then what `torch.compiler.save_cache_artifacts` returned."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...trust.atomic_files import replacing
from ...trust.foreign import Foreign, parse_as
from ...trust.text import shown
from ..errors import BadCompiled
from .target import Target

SUFFIX = ".compiled"  # of a target's folder
_MAX_HEADER = 2**16  # bytes


class _Header(Foreign):
    kind: Literal["onediff-guard compiled code"]
    format: Literal[2]
    target: Target = Field(alias="for")
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # of the artifacts


def read(file: Path) -> tuple[Target, bytes]:
    """What it is for, and the artifacts; nothing of them is run. Raises BadCompiled, OSError."""
    if file.exists() and not file.is_file():  # opening a pipe waits for whoever writes into it
        raise BadCompiled("'{}' is no compiled code that can be used: {}.", shown(file.name, 100), "it is no file")
    return parse(file.read_bytes(), file.name)


def parse(data: bytes, name: str) -> tuple[Target, bytes]:
    """The same of the bytes of a file called `name`. Raises BadCompiled."""
    line, _, artifacts = data.partition(b"\n")
    try:
        if len(line) > _MAX_HEADER:
            raise ValueError(f"its first line has more than {_MAX_HEADER:,} bytes")
        header = parse_as(_Header, line)
        if hashlib.sha256(artifacts).hexdigest() != header.sha256:
            raise ValueError("it is damaged, or not whole")
    except ValueError as error:
        raise BadCompiled("'{}' is no compiled code that can be used: {}.", shown(name, 100), error) from None
    return header.target, artifacts


def write(file: Path, target: Target, artifacts: bytes) -> None:
    """Whole or not at all. Raises OSError."""
    digest = hashlib.sha256(artifacts).hexdigest()
    header = {"kind": "onediff-guard compiled code", "format": 2, "for": asdict(target), "sha256": digest}
    with replacing(file) as stream:
        stream.write(json.dumps(header).encode() + b"\n" + artifacts)
