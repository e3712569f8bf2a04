"""The header of a safetensors file, which somebody else wrote: checked against the file before anything is read by it.

Layout: 8 bytes of length, that much JSON {name: {dtype, shape, data_offsets}}, then the tensors, one behind the other.
See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..trust.foreign import Foreign, Unreadable, fitting, is_lfs_pointer, object_in, parse
from ..trust.text import shown

FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}  # bits, by safetensors' name
_BITS = {name: int(name[1:]) for name in ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64")} | {
    **FLOATS,
    **dict.fromkeys(("BOOL", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_MAX_BYTES = 32 * 2**20  # of JSON; the largest published one, of a checkpoint with the trainer's notes in it, has 2 MB
_MAX_NAME = 1000  # characters

_Size = Annotated[int, Field(ge=0, le=2**48)]


class Tensor(Foreign):
    dtype: str
    shape: Annotated[list[_Size], Field(max_length=8)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]

    @property
    def n_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


@dataclass(frozen=True)
class Header:
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        counted: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counted[tensor.dtype] += tensor.n_bytes
        return dict(counted)


def read_header(file: Path) -> Header:
    """What the file holds. Reads no tensor. Raises OSError, or Unreadable: what is wrong, the end of a sentence."""
    size, text = file.stat().st_size, header_text(file)
    entries = dict(object_in(parse(text)))
    metadata = fitting(dict[str, str], entries.pop("__metadata__", None) or {})
    if long := next((name for name in entries if len(name) > _MAX_NAME), ""):
        raise Unreadable(f"it names a tensor '{shown(long)}', in {len(long):,} characters")
    tensors = fitting(dict[str, Tensor], entries)
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, until = tensor.data_offsets
        if tensor.dtype not in _BITS:
            raise Unreadable(f"'{shown(name)}' is of a dtype '{shown(tensor.dtype)}' that is not known")
        if begin != end or until < begin:
            raise Unreadable(f"'{shown(name)}' lies at {begin:,} to {until:,}, where {end:,} is the next byte")
        if prod(tensor.shape) * _BITS[tensor.dtype] != 8 * (until - begin):
            raise Unreadable(f"'{shown(name)}', {tensor.dtype} of shape {tensor.shape}, has {until - begin:,} bytes")
        end = until
    if size != (promised := 8 + len(text) + end):
        raise Unreadable(f"its header promises {promised:,}, and it has {size:,} bytes")
    return Header(tensors, metadata)


def header_text(file: Path) -> bytes:
    """The header's JSON, not parsed. Raises OSError, or Unreadable where the file is shorter than that."""
    if not file.is_file():
        raise FileNotFoundError(f"no file: {file.name}")
    size = file.stat().st_size
    if is_lfs_pointer(file):
        raise Unreadable(f"it is a Git LFS pointer ({size} bytes), not the file: run `git lfs pull` where it lies")
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise Unreadable(f"its header is cut off, after {size:,} bytes")
        if length > _MAX_BYTES:
            raise Unreadable(f"its header has {length:,} bytes, and {_MAX_BYTES:,} is the most that is read")
        return stream.read(length)
