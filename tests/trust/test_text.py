"""Untrusted text is made harmless for pages, terminals, messages and file names."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from comfyui_onediff_guard.trust.message import for_file_name, for_page, for_terminal, listed, shown, without_password
from hypothesis import given
from hypothesis import strategies as st


def test_markup_and_links_are_escaped_for_page() -> None:
    assert for_page("<img src=x onerror='a()'> & \"b\"\x1b[0m") == (
        "&lt;img src=x onerror=&#x27;a()&#x27;&gt; &amp; &quot;b&quot;�&#91;0m"
    )
    assert for_page("[[here|https://a.b]] __LNK0__ ![x](https://a.b/c_d)") == (
        "&#91;&#91;here|https://a.b]] &#95;_LNK0__ !&#91;x](https://a.b/c_d)"
    )


def test_control_characters_are_replaced_for_terminal() -> None:
    assert for_terminal("a\r\nb\tc\x1b]0;title\x07\r\x9b2J\u202eevil") == "a\nb\tc�]0;title��" + "�2J�evil"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("two\nlines\x1b[2J", "two lines�[2J"),
        ("x" * 100, "x" * 59 + "…"),
        ({"a": [1, None]}, "{'a': [1, None]}"),
        (list(range(1000)), "a list of 1000"),
        ("\ud800", "�"),
    ],
)
def test_value_in_message_is_short_and_printable(value: object, text: str) -> None:
    assert shown(value) == text


@given(
    st.recursive(st.none() | st.text() | st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_random_value_becomes_one_short_line(value: object) -> None:
    text = shown(value)
    assert len(text) <= 60 and text == for_terminal(text) and "\n" not in text
    text.encode()


@given(st.text())
def test_random_text_becomes_plain_file_name(text: str) -> None:
    name = for_file_name(text)
    assert PurePath(name).name == name and 0 < len(name.encode()) <= 100 and name not in (".", "..")


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("http://user:secret@host:8188/a?b=c", "http://host:8188/a?b=c"),
        ("user:secret@host:8188", "host:8188"),
        ("http://user:se/cr@t@host", "http://host"),
        ("http:/user:secret@host", "host"),
        ("http://host/a?mail=a@b", "http://host/a?mail=a@b"),
        ("https://host", "https://host"),
        ("http://[::1", "http://[::1"),
        ("127.0.0.1:8188", "127.0.0.1:8188"),
    ],
)
def test_password_is_removed_from_address(url: str, printed: str) -> None:
    assert without_password(url) == printed


def test_long_list_ends_with_count_of_omitted_items() -> None:
    assert listed([]) == ""
    assert listed(["a\x1b", 1, None]) == "a�, 1, None"
    assert listed(("x" * 100 for _ in range(50)), most=2, between=" -> ", limit=3) == "xx… -> xx… and 48 more"
