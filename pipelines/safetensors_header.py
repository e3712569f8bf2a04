"""The header of a safetensors file: what it holds, without reading a tensor.

The safetensors library checks it against the file. See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..trust.foreign import Unreadable, check_whole
from ..trust.text import shown

_MOST_BYTES = 32 * 2**20  # of a header; the largest published one, of a checkpoint with its trainer's notes, has 2 MB
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}  # by safetensors' names


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        bits = re.match(r"[A-Z]+(\d+)", self.dtype)  # none in BOOL
        return prod(self.shape) * int(bits[1] if bits else 8) // 8


@dataclass(frozen=True)
class Header:
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def bytes_by_dtype(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for tensor in tensors.values():
        counted[tensor.dtype] += tensor.n_bytes
    return dict(counted)


def read_header(file: Path) -> Header:
    """Return what a file holds. Raises OSError, or Unreadable where it is not whole: the end of a sentence."""
    from safetensors import SafetensorError, safe_open

    _length(file)
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no dictionary
            tensors = {name: Tensor(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            return Header(tensors, opened.metadata() or {})
    except SafetensorError as error:
        raise Unreadable(f"it has {file.stat().st_size:,} bytes ({shown(str(error), 200)})") from None


def header_text(file: Path) -> bytes:
    """Return the JSON of a header, not parsed. Raises OSError, or Unreadable where the file is shorter than that."""
    length, size = _length(file), file.stat().st_size
    if length > size - 8:
        raise Unreadable(f"its header is cut off, after {size:,} bytes")
    with file.open("rb") as stream:
        stream.seek(8)
        return stream.read(length)


def _length(file: Path) -> int:
    """Return how many bytes a header is to have, by the file's first 8. Raises OSError, or Unreadable where there is no
    file, and where its header is larger than any model's."""
    check_whole(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if _MOST_BYTES < length < file.stat().st_size:
        raise Unreadable(f"its header has {length:,} bytes, and {_MOST_BYTES:,} is the most that is read")
    return length
