"""Untrusted JSON is parsed within limits, and mismatches are reported with their path."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from comfyui_onediff_guard.trust.foreign import Foreign, Unreadable, fitting, parse, parse_as, read, values_in
from hypothesis import given
from hypothesis import strategies as st


class Child(Foreign):
    name: str
    sizes: list[int] = []


class Parent(Foreign):
    children: dict[str, Child]
    weight: float = 1.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"a": 1}}', "[" * 250 + "]" * 250, "[" * 100_000, "1" * 5000),
        *("NaN", "-Infinity", '"\\ud800"', '"\ud800"', b"\xff\xfe"),
    ],
)
def test_invalid_json_is_rejected(text: str | bytes) -> None:
    with pytest.raises(Unreadable, match="it is not JSON"):
        parse(text)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_wrong_encoding_is_named(encoding: str) -> None:
    with pytest.raises(Unreadable, match="it is not UTF-8; save it in this encoding"):
        parse('{"name": "café"}'.encode(encoding))


def test_nan_option_accepts_nan_and_infinity() -> None:
    assert str(parse("[NaN, Infinity]", nan=True)) == "[nan, inf]"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "children is missing"),
        ([], r"it is \[\]: input should be"),
        ({"children": {"a": {"name": 3}}}, "children.a.name is 3: input should be a valid string"),
        ({"children": {"a": {"name": "x", "sizes": [1, True]}}}, r"children.a.sizes\[1\] is True: input should"),
        ({"children": {"a\x1b[2J": {}}}, "children.a�\\[2J.name is missing"),
        ({"children": {}, "weight": float("inf")}, "weight is inf: input should be a finite number"),
        ({"children": {}, "weight": "9" * 500}, "weight is 9{59}…: input should be a valid number"),
        ({"children": {"a": {}, "b": {}}}, "children.a.name is missing .and 1 more"),
    ],
)
def test_mismatch_is_reported_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        fitting(Parent, value)


def test_valid_json_becomes_model() -> None:
    parent = parse_as(Parent, '{"children": {"a": {"name": "x", "sizes": [1, 2]}}, "weight": 3, "unknown": null}')
    assert parent == Parent(children={"a": Child(name="x", sizes=[1, 2])}, weight=3.0)


def test_plain_types_are_checked() -> None:
    assert fitting(dict[str, list[str]], {"a": ["b"]}) == {"a": ["b"]}
    with pytest.raises(Unreadable, match=r"a\[0\] is 1: input should be a valid string"):
        fitting(dict[str, list[str]], {"a": [1]})


def test_file_above_size_limit_is_rejected(tmp_path: Any) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1, 2]")
    assert read(tmp_path / "a.json") == [1, 2]
    with pytest.raises(Unreadable, match="it is larger than 8 bytes"):
        read(tmp_path / "a.json", limit=8)


@given(st.binary(max_size=200))
def test_random_bytes_are_parsed_or_rejected(data: bytes) -> None:
    with suppress(Unreadable):
        json.dumps(parse(data))


@pytest.mark.parametrize("value", [[], {}, {"a": {"b": [1, "x", None]}}, [[], [], {}], {"text": "a, b: [c]"}, 5])
def test_value_count_is_never_too_low(value: Any) -> None:
    def count(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(map(count, inner))

    assert count(value) <= values_in(json.dumps(value).encode())
