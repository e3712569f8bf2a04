"""Untrusted JSON: workflows, profiles, configs, headers, answers of a server.

Pydantic's own parser limits the nesting of values and the length of numbers. The values are then validated against
models, so that later code needs no type checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import pydantic
import pydantic_core

from .message import shown

MAX_BYTES = 64 * 2**20
BOM = b"\xef\xbb\xbf"  # a byte order mark, which some editors put before UTF-8
_LFS = b"version https://git-lfs.github.com/spec/"
_WANTED: dict[str, str] = dict.fromkeys(
    ("model_type", "model_attributes_type", "dict_type"), "input should be an object"
)
PLAIN = pydantic.ConfigDict(strict=True, allow_inf_nan=False)  # for types that are no models
T = TypeVar("T")


class Unreadable(ValueError):
    """Untrusted data cannot be used. The message says what was found and where, to end 'it is no workflow: …'."""


class Foreign(pydantic.BaseModel):
    """Base of the models of untrusted JSON objects: strict types (a JSON array fits `list`, not `tuple`) and finite
    numbers. Unknown fields are ignored."""

    model_config = pydantic.ConfigDict(
        strict=True, frozen=True, extra="ignore", populate_by_name=True, allow_inf_nan=False
    )


def read(file: Path, *, limit: int = MAX_BYTES, nan: bool = False) -> Any:
    """Return the JSON in a file. limit: in bytes. Raises OSError, or Unreadable as `read_bytes` and `parse` do."""
    return parse(read_bytes(file, limit=limit).removeprefix(BOM), nan=nan)


def read_bytes(file: Path, *, limit: int) -> bytes:
    """Return the bytes of a file. Raises OSError, or Unreadable if they are more than the limit."""
    with file.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise Unreadable(f"it is larger than {limit:,} bytes")
    return data


def check_whole(file: Path) -> None:
    """Raise Unreadable if it is no regular file, or is a Git LFS pointer in place of one. Raises OSError, also if it is
    missing."""
    size = file.stat().st_size
    if not file.is_file():
        raise Unreadable("it is not a file")
    with file.open("rb") as stream:
        if stream.read(len(_LFS)) == _LFS:
            raise Unreadable(f"it is a Git LFS pointer ({size} bytes), not the file: run `git lfs pull` in its folder")


def values_in(data: bytes) -> int:
    """Return at most how many values JSON holds, without parsing it: each takes up to 80 bytes of memory."""
    return 1 + sum(map(data.count, (b",", b":", b"[", b"{")))


def parse(data: bytes | str, *, nan: bool = False) -> Any:
    """Return JSON as Python's dictionaries, lists, text and numbers.

    nan: whether to accept NaN and Infinity, which Python writes although they are no JSON.

    A number beyond float64's range becomes infinity in any case: models of numbers refuse it.

    Raises Unreadable: not UTF-8, not JSON, nested more than about 200 deep, a lone surrogate, a number of 4,300 digits.
    """
    try:
        return pydantic_core.from_json(data, allow_inf_nan=nan)
    except (TypeError, ValueError) as error:  # TypeError: text with a lone surrogate
        why = ""
        if "surrogate" in str(error) or "end of hex escape" in str(error):
            why = ": it contains half a character, as from a cut-off emoji; type that again"
        elif isinstance(data, bytes) and not _is_utf_8(data):
            why = ": it is not UTF-8; save it in this encoding"
        raise Unreadable(f"it is not JSON{why} ({error})") from None


def _is_utf_8(data: bytes) -> bool:
    """Return whether JSON may be UTF-8. In UTF-16, as of PowerShell's `>`, it has zero bytes."""
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def parse_as(kind: type[T], data: bytes | str) -> T:
    """Return JSON as `kind`, a model or a type of plain values. Raises Unreadable, as `parse` and `fitting` do."""
    return fitting(kind, parse(data))


def fitting(kind: type[T], value: Any) -> T:
    """Return a parsed value as `kind`. Raises Unreadable, which names the first misfit and its value."""
    try:
        return _adapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        raise Unreadable(_in_words(error)) from None
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None


def nothing_is_empty(value: Any) -> Any:
    """Return {} for null, which some programs write for an object without fields. For a `BeforeValidator`."""
    return {} if value is None else value


def object_in(value: Any) -> Mapping[str, Any]:
    """Return a parsed value that must be an object. Raises Unreadable."""
    if not isinstance(value, dict):
        raise Unreadable(f"it holds {shown(value)}, expected an object")
    return cast("dict[str, Any]", value)


@lru_cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    is_model = isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)  # which has its own config
    return pydantic.TypeAdapter(kind, config=None if is_model else PLAIN)


def _in_words(error: pydantic.ValidationError) -> str:
    """Return the first misfit, as 'nodes[3].inputs is x: input should be a valid list', and how many more."""
    first, *others = error.errors(include_url=False, include_context=False)
    place = ""
    for step in first["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{shown(step)}" if place else shown(step)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "missing":
        return f"{place} is missing{more}"
    wanted = _WANTED.get(first["type"]) or f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    return f"{place or 'it'} is {shown(first['input'])}: {wanted}{more}"
