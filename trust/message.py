"""Text for people that remembers what it was made of, so that it can be said in another language.

`Message("'{}' has no {}.", name, what)` is the string that `str.format` makes of it. Its template and fields travel
with it, so nothing is read back out of the text. Other people's text is a field, never a template, and the functions
at the end make it fit to be shown: on a page, in a terminal, in a message, in a file's name.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import lru_cache
from string import Formatter
from typing import Any


class Message(str):
    """A text in English, with its template and fields.

    template: as `str.format` takes it, with fields by position, and written in the source. Without fields it is the
        text as it is. `self.template` numbers the fields anew: "{0} of {1}".
    fields: put into the template as `str.format` does. A Message, and an error that was raised with one, stays a
        Message where the template has neither a conversion nor a format for it.
    """

    __slots__ = ("fields", "template")
    template: str
    fields: tuple[str, ...]

    def __new__(cls, template: str, *fields: object) -> Message:
        bare, holes = _read(template) if fields else (escaped(template), ())
        filled = tuple(_text(fields[index], form) for index, form in holes)
        made = super().__new__(cls, bare.format(*filled))
        made.template, made.fields = bare, filled
        return made

    def __reduce__(self) -> tuple[type[Message], tuple[str, ...]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Message, (self.template if self.fields else str(self), *self.fields)

    def __add__(self, other: str) -> Message:
        return joined("", (self, other))

    def __radd__(self, other: str) -> Message:
        return joined("", (other, self))


class Told(Exception):
    """An error for people: raised with a template and its fields, or with a text alone."""

    def __init__(self, template: str = "", *fields: object):
        super().__init__(Message(template, *fields) if fields else template)


class BadInput(Told, ValueError):
    """Something wired to a node does not fit."""


def joined(joint: str, parts: Iterable[str]) -> Message:
    """What `joint.join(parts)` gives, as a Message."""
    fields = tuple(parts)
    return Message(joint.join(["{}"] * len(fields)), *fields) if fields else Message("")


def message_of(error: BaseException) -> str:
    """What `str(error)` gives: as a Message where it was raised with one."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, Message) and str(error) == first else str(error)


def numbered(template: str) -> str:
    """A template as catalogues have it, its fields numbered and without formats."""
    return _read(template)[0]


def escaped(text: str) -> str:
    """Text as a template without fields."""
    return text.replace("{", "{{").replace("}", "}}")


@lru_cache(maxsize=2048)
def _read(template: str) -> tuple[str, tuple[tuple[int, str], ...]]:
    """The template with its fields numbered, and of each: which argument it is, and how that becomes text."""
    bare, holes = "", list[tuple[int, str]]()
    for literal, name, form, conversion in Formatter().parse(template):
        bare += escaped(literal)
        if name is not None:
            bare += f"{{{len(holes)}}}"
            how = (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            holes.append((int(name) if name else len(holes), f"{{{how}}}"))
    return bare, tuple(holes)


def _text(field: object, form: str) -> str:
    if form != "{}":
        return form.format(field)
    return (
        message_of(field) if isinstance(field, BaseException) else field if isinstance(field, Message) else str(field)
    )


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
