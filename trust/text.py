"""Other people's text on its way out: to a page, a terminal, a message, a file's name."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
_HALF = re.compile(r"[\ud800-\udfff]")  # of a character, which no encoding takes
_LOGIN = re.compile(r"^((?:[a-z][\w+.-]*:)?//)?[^?#]*@", re.IGNORECASE)  # greedy: a password may hold any character
_LINK = re.compile(r"\[|_(?=_LNK)")  # begins a link of Markdown's or of ComfyUI's, and what its page makes of that
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")


def for_page(text: str) -> str:
    """Text that a page shows as it is, and never runs. ComfyUI's page takes it for Markdown in places: it is no picture
    from elsewhere there, and no link that shows other words than its address."""
    return _LINK.sub(lambda mark: f"&#{ord(mark[0])};", html.escape(for_terminal(text)))


def is_whole(text: str) -> bool:
    """Whether it has no half of a character, which no encoding takes: of an emoji that was cut, or of bytes that are no
    text."""
    return _HALF.search(text) is None


def for_terminal(text: str) -> str:
    """Text without what a terminal obeys (escape sequences, marks that turn the direction), lines kept."""
    return _HALF.sub("�", _CONTROL.sub("�", text.replace("\r\n", "\n")))


def shown(value: Any, limit: int = 60) -> str:
    """A value for a message: printable, in one line, cut to `limit` characters."""
    if isinstance(value, (dict, list, tuple)) and len(value) > limit:
        text = f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    elif isinstance(value, str):
        text = value[: limit + 1]
    else:
        try:
            text = repr(value)
        except (RecursionError, ValueError):  # an int of thousands of digits has no text
            text = f"a very long or deep {type(value).__name__}"
    text = " ".join(for_terminal(text).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def listed(values: Iterable[Any], most: int = 12, *, between: str = ", ", limit: int = 60) -> str:
    """Values for a message, each cut to `limit` characters: the first of them, and how many more there are."""
    everything = list(values)
    first = between.join(shown(value, limit) for value in everything[:most])
    return f"{first} and {len(everything) - most} more" if len(everything) > most else first


def for_file_name(text: str, limit: int = 100) -> str:
    """Text as a part of a file's name: letters, digits, dots and dashes. limit: in bytes."""
    plain = _NOT_IN_NAMES.sub("-", text[:limit]).encode()[:limit].decode(errors="ignore")
    return plain.strip("-.") or "unnamed"


def without_password(url: str) -> str:
    """An address as it may be printed and logged, whether it can be read or not."""
    return for_terminal(_LOGIN.sub(r"\1", url))
