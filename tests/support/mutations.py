"""Damaged copies of valid files for fuzzing: as by a mistake, a broken disk or an attacker."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_DEEP: Any = "bottom"
for _ in range(150):
    _DEEP = [_DEEP]

_NUMBERS = (0, 1, -1, 2, 2**31, 2**63, -(2**64), 10**400, 0.0, -0.0, 0.5, 1e-320, 1e10, 1e300)
_TEXTS = (
    *("", " ", "0", "1e999", "-1", "NaN", "null", "None", "a.b", "..", "../../x", "/etc/passwd", "C:\\x", "a\0b", "\n"),
    *("\x1b[2J", "<img src=x onerror=alert(1)>", "é", "日本", "\u202e", "x" * 5000, "%s%n{0}{a.b}", "(a+)+$"),
)
_LISTS: tuple[Any, ...] = ([], [None], [[]], ["1", 0], ["1", -1], ["1", 10**30], ["1", True], [1, 2, 3], _DEEP)
_OBJECTS = ({}, {"": None}, {"a": {}}, {"__value__": []}, {"id": 1}, {"__class__": "x"})
NASTY: tuple[Any, ...] = (
    *(None, True, False, math.inf, -math.inf, math.nan, *_NUMBERS),
    *("__class__", *_TEXTS, *_LISTS, *_OBJECTS),
)
_TOKENS = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"[" * 300, b"{" * 300, b'"', b"\\ud800"),
    *(b"NaN", b"1e999", b"9" * 5000, b"\xef\xbb\xbf"),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside `value`, including itself."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*at, key))


@st.composite
def mutated(draw: st.DrawFn, seed: Any, most: int = 3) -> Any:
    """A copy of a JSON value with up to `most` values replaced, dropped, renamed, duplicated, wrapped or exchanged."""
    value = copy.deepcopy(seed)
    for _ in range(draw(st.integers(1, most))):
        ways = list(places(value))
        way = ways[draw(st.integers(0, len(ways) - 1))]
        if not way:
            if draw(st.integers(0, 9)) == 0:
                value = copy.deepcopy(draw(st.sampled_from(NASTY)))
            continue
        parent = value
        for step in way[:-1]:
            parent = parent[step]
        _damage(draw, parent, way[-1], value, ways)
    return value


def _damage(draw: st.DrawFn, parent: Any, key: Any, whole: Any, ways: list[tuple[Any, ...]]) -> None:
    kind = draw(st.sampled_from(("nasty", "nasty", "nasty", "drop", "rename", "double", "wrap", "other", "text")))
    if kind == "nasty":
        parent[key] = copy.deepcopy(draw(st.sampled_from(NASTY)))
    elif kind == "text":
        parent[key] = draw(st.text(max_size=12))
    elif kind == "drop":
        del parent[key]
    elif kind == "wrap":
        parent[key] = [parent[key]] if draw(st.booleans()) else {"value": parent[key]}
    elif kind == "other":  # a value from elsewhere in the file
        other = whole
        for step in ways[draw(st.integers(0, len(ways) - 1))]:
            other = other[step]
        parent[key] = copy.deepcopy(other)
    elif isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[draw(st.text(max_size=8))] = parent.pop(key) if kind == "rename" else copy.deepcopy(parent[key])


@st.composite
def mutated_bytes(draw: st.DrawFn, seed: bytes, most: int = 4) -> bytes:
    """A copy of a file with up to `most` changes: bits flipped, bytes cut out, duplicated, inserted, or the end cut."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from((1, 1, 2, 4, 8, 64, 1000)))
        kind = draw(st.sampled_from(("flip", "flip", "set", "cut", "double", "token", "end")))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            data[at : at + length] = draw(st.binary(min_size=length, max_size=length)) if length < 64 else bytes(length)
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "double":
            data[at:at] = data[at : at + length]
        elif kind == "token":
            data[at:at] = draw(st.sampled_from(_TOKENS))
        elif kind == "end":
            del data[at:]
    return bytes(data)


def mutated_text(seed: Any, most: int = 3) -> st.SearchStrategy[bytes]:
    """The bytes of a JSON file: of a damaged value, or damaged bytes."""
    whole = json.dumps(seed).encode()
    return st.one_of(mutated(seed, most).map(lambda value: json.dumps(value).encode()), mutated_bytes(whole))
