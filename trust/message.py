"""Text for users that keeps its template and fields, so that it can be translated.

`Message("'{}' has no {}.", name, what)` is the string that `str.format` returns. It carries its template and fields, so
nothing is parsed back out of the text. Untrusted text is a field, never a template. The functions at the end make it
safe to show: on a page, in a terminal, in a message, in a file's name.
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

    template: as for `str.format`, with fields by position, and a literal in the source. Without fields it is the text
        itself. `self.template` numbers the fields anew: "{0} of {1}".
    fields: inserted as by `str.format`. A Message, or an error that was raised with one, stays a Message if the
        template has neither a conversion nor a format for it.
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
    """An error whose message is shown to users: raised with a template and its fields, or with a text alone."""

    def __init__(self, template: str = "", *fields: object):
        super().__init__(Message(template, *fields) if fields else template)


class BadInput(Told, ValueError):
    """Something wired to a node does not fit."""


def joined(joint: str, parts: Iterable[str]) -> Message:
    """Return `joint.join(parts)` as a Message."""
    fields = tuple(parts)
    return Message(joint.join(["{}"] * len(fields)), *fields) if fields else Message("")


def message_of(error: BaseException) -> str:
    """Return `str(error)`, as a Message if the error was raised with one."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, Message) and str(error) == first else str(error)


def numbered(template: str) -> str:
    """Return a template as in the catalogues: fields numbered, without formats."""
    return _read(template)[0]


def escaped(text: str) -> str:
    """Return text as a template without fields."""
    return text.replace("{", "{{").replace("}", "}}")


@lru_cache(maxsize=2048)
def _read(template: str) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return the template with numbered fields, and for each field its argument's index and its format."""
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
_HALF = re.compile(r"[\ud800-\udfff]")  # lone surrogates, which no encoding takes
_LOGIN = re.compile(r"^((?:[a-z][\w+.-]*:)?//)?[^?#]*@", re.IGNORECASE)  # greedy: a password may hold any character
_LINK = re.compile(r"\[|_(?=_LNK)")  # the start of a link (Markdown's, ComfyUI's) or of the page's placeholder for one
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")


def for_page(text: str) -> str:
    """Return text that a page shows as it is, and never runs. ComfyUI's page renders Markdown in places: the text
    embeds no remote picture there, and no link whose words differ from its address."""
    return _LINK.sub(lambda mark: f"&#{ord(mark[0])};", html.escape(for_terminal(text)))


def is_whole(text: str) -> bool:
    """Return whether text has no lone surrogate, which no encoding takes: it comes from a cut emoji, or from bytes that
    are no text."""
    return _HALF.search(text) is None


def for_terminal(text: str) -> str:
    """Return text without terminal controls (escape sequences, marks that change the direction). Lines are kept."""
    return _HALF.sub("�", _CONTROL.sub("�", text.replace("\r\n", "\n")))


def shown(value: Any, limit: int = 60) -> str:
    """Return a value for a message: printable, in one line, cut to `limit` characters."""
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
    """Return values for a message: the first `most`, each cut to `limit` characters, and how many more there are."""
    everything = list(values)
    first = between.join(shown(value, limit) for value in everything[:most])
    return f"{first} and {len(everything) - most} more" if len(everything) > most else first


def for_file_name(text: str, limit: int = 100) -> str:
    """Return text as a part of a file's name: letters, digits, dots and dashes. limit: in bytes."""
    plain = _NOT_IN_NAMES.sub("-", text[:limit]).encode()[:limit].decode(errors="ignore")
    return plain.strip("-.") or "unnamed"


def without_password(url: str) -> str:
    """Return an address without its login, to print or log it. The address may be malformed."""
    return for_terminal(_LOGIN.sub(r"\1", url))
