"""Text for people that remembers what it was made of, so that it can be said in another language.

`Message("'{}' has no {}.", name, what)` is the string that `str.format` makes of it. Its template and fields travel
with it, so nothing is read back out of the text. Other people's text is a field, never a template.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from string import Formatter


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
