"""Other people's JSON: parsed within bounds, and what does not fit is named with its place."""

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
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(Unreadable, match="it is not JSON"):
        parse(text)


def test_json_of_python_has_nan_where_that_is_asked_for() -> None:
    assert str(parse("[NaN, Infinity]", nan=True)) == "[nan, inf]"


@pytest.mark.parametrize(
    ("value", "said"),
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
def test_what_does_not_fit_is_named_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        fitting(Parent, value)


def test_what_fits_is_a_model() -> None:
    parent = parse_as(Parent, '{"children": {"a": {"name": "x", "sizes": [1, 2]}}, "weight": 3, "unknown": null}')
    assert parent == Parent(children={"a": Child(name="x", sizes=[1, 2])}, weight=3.0)


def test_plain_types_are_checked_too() -> None:
    assert fitting(dict[str, list[str]], {"a": ["b"]}) == {"a": ["b"]}
    with pytest.raises(Unreadable, match=r"a\[0\] is 1: input should be a valid string"):
        fitting(dict[str, list[str]], {"a": [1]})


def test_a_file_is_read_up_to_a_limit(tmp_path: Any) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1, 2]")
    assert read(tmp_path / "a.json") == [1, 2]
    with pytest.raises(Unreadable, match="it is larger than 8 bytes"):
        read(tmp_path / "a.json", limit=8)


@given(st.binary(max_size=200))
def test_any_bytes_are_json_or_refused(data: bytes) -> None:
    with suppress(Unreadable):
        json.dumps(parse(data))


@pytest.mark.parametrize("value", [[], {}, {"a": {"b": [1, "x", None]}}, [[], [], {}], {"text": "a, b: [c]"}, 5])
def test_values_are_counted_or_overcounted(value: Any) -> None:
    def count(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(map(count, inner))

    assert count(value) <= values_in(json.dumps(value).encode())
