"""JSON that somebody else wrote: workflows, profiles, configs, headers, answers of a server.

Parsed by pydantic's own parser, which bounds how deep values are nested and how long numbers are, and checked against
models, so that code behind this gate never asks what kind of value it has.
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
    """What was found, and where: the end of a sentence like 'it is no workflow: …'."""


class Foreign(pydantic.BaseModel):
    """What a JSON object of somebody else's has to hold: finite numbers, and of the kind that is written there (a JSON
    array fits `list`, no `tuple`). Fields that no model names are left alone."""

    model_config = pydantic.ConfigDict(
        strict=True, frozen=True, extra="ignore", populate_by_name=True, allow_inf_nan=False
    )


def read(file: Path, *, limit: int = MAX_BYTES, nan: bool = False) -> Any:
    """The JSON in a file. limit: in bytes. Raises OSError, or Unreadable as `parse` does."""
    return parse(read_bytes(file, limit=limit).removeprefix(BOM), nan=nan)


def read_bytes(file: Path, *, limit: int) -> bytes:
    """What a file holds. Raises OSError, or Unreadable where it has more bytes than the limit."""
    with file.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise Unreadable(f"it is larger than {limit:,} bytes")
    return data


def check_whole(file: Path) -> None:
    """Raise Unreadable where there is no regular file, or what Git leaves in its place without Git LFS. Raises OSError,
    also where there is nothing."""
    size = file.stat().st_size
    if not file.is_file():
        raise Unreadable("it is no file")
    with file.open("rb") as stream:
        if stream.read(len(_LFS)) == _LFS:
            raise Unreadable(f"it is a Git LFS pointer ({size} bytes), not the file: run `git lfs pull` where it lies")


def values_in(data: bytes) -> int:
    """How many values JSON holds at most, counted without reading it: each takes up to 80 bytes of memory."""
    return 1 + sum(map(data.count, (b",", b":", b"[", b"{")))


def parse(data: bytes | str, *, nan: bool = False) -> Any:
    """JSON as Python's dictionaries, lists, text and numbers.

    nan: whether NaN and Infinity, which are no JSON but are written by Python, are numbers.

    A number beyond float64's range is infinity all the same: models of numbers refuse it.

    Raises Unreadable: no UTF-8, no JSON, nested more than some 200 deep, half a character, a number of 4,300 digits.
    """
    try:
        return pydantic_core.from_json(data, allow_inf_nan=nan)
    except (TypeError, ValueError) as error:  # TypeError: of text with half a character
        half = "surrogate" in str(error) or "end of hex escape" in str(error)
        why = ": half a character, as a cut-off emoji leaves it, stands in it; write that anew" if half else ""
        raise Unreadable(f"it is not JSON{why} ({error})") from None


def parse_as(kind: type[T], data: bytes | str) -> T:
    """JSON as `kind`, a model or a type of plain values. Raises Unreadable, as `parse` and `fitting` do."""
    return fitting(kind, parse(data))


def fitting(kind: type[T], value: Any) -> T:
    """A parsed value as `kind`. Raises Unreadable: the first place that does not fit, and what stands there."""
    try:
        return _adapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        raise Unreadable(_in_words(error)) from None
    except RecursionError:
        raise Unreadable("it is nested too deep") from None


def nothing_is_empty(value: Any) -> Any:
    """For a `BeforeValidator` of an object: null, where some write that for one without fields."""
    return {} if value is None else value


def object_in(value: Any) -> Mapping[str, Any]:
    """A parsed value that has to be an object. Raises Unreadable."""
    if not isinstance(value, dict):
        raise Unreadable(f"it holds {shown(value)} where an object belongs")
    return cast("dict[str, Any]", value)


@lru_cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    is_model = isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)  # which has its own
    return pydantic.TypeAdapter(kind, config=None if is_model else PLAIN)


def _in_words(error: pydantic.ValidationError) -> str:
    """'nodes[3].inputs is "x": Input should be a valid list'"""
    first, *others = error.errors(include_url=False, include_context=False)
    place = ""
    for step in first["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{shown(step)}" if place else shown(step)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "missing":
        return f"{place} is missing{more}"
    wanted = _WANTED.get(first["type"]) or f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    return f"{place or 'it'} is {shown(first['input'])}: {wanted}{more}"
