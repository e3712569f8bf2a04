"""Translation of messages into the language of the user's page.

Messages (`trust/message.py`) are written in English in the source, and keep their template and fields.
`locales/<language>/messages.json` maps templates to translations; `scripts/messages.py` extracts the templates from the
source. Templates are translated. Fields are not, unless they are Messages: they may be untrusted text. Text without a
translation stays English, and so does all text without ComfyUI or on an English page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ..trust.message import Message, message_of
from .page_settings import settings_of

LOCALES = Path(__file__).resolve().parents[1] / "locales"
JOINTS = ("; ", ", ", ": ", " · ", " → ")  # separators in a line; the catalogue translates them too
SETTINGS = ("Comfy.Locale", "OneDiffGuard.Language")  # the user's choice, else the page's language (web/language.js)
_PACKAGE = __name__.removesuffix(".comfyui_host.language")
_WORD = re.compile(r"[^\W\d_]{3}")


def page_language() -> str:
    """Return the language of ComfyUI's page: "zh", "ru" and so on; "" if unknown, or without ComfyUI."""
    settings = settings_of()
    chosen = (settings.get(setting) for setting in SETTINGS)
    return next((each for each in chosen if isinstance(each, str) and each.isalpha()), "")


def translated(text: str) -> str:
    """Return a status, a report or an error's message in the page's language. Of several sentences in a message, only
    the first is translated."""
    catalogue = _catalogue(page_language())
    return catalogue.said(text) if catalogue else text


@contextmanager
def speaking() -> Generator[None]:
    """Translate the first sentence of this pack's errors that leave the block, and give them a readable class name:
    ComfyUI also shows the class's module, which is a path on this machine."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(f"{_PACKAGE}.") and error.args and isinstance(error.args[0], str):
            error.args = (translated(message_of(error)), *error.args[1:])
            if "execution" in sys.modules or "comfy.cmd.execution" in sys.modules:
                error.__class__ = _readable(type(error))
        raise


@lru_cache
def _readable(kind: type[Exception]) -> type[Exception]:
    return type(kind.__name__, (kind,), {"__module__": "OneDiffGuard"})


class Catalogue:
    """The templates of one language."""

    def __init__(self, messages: dict[str, str]):
        self._messages = messages
        self._template = lru_cache(maxsize=512)(self._translated)

    def said(self, text: str) -> str:
        """Translate a Message, or a text from the source, which is its own template."""
        if isinstance(text, Message):
            fields = (self.said(field) if isinstance(field, Message) else field for field in text.fields)
            return self._template(text.template).format(*fields)
        return self._sentence(text) or text

    def _sentence(self, template: str) -> str:
        first, rest = first_sentence(template)
        return self._messages[first] + rest if first in self._messages else ""

    def _translated(self, template: str) -> str:
        if (found := self._sentence(template)) or _WORD.search(template):
            return found or template
        for joint in JOINTS:
            template = template.replace(joint, self._messages[joint])
        return template[:-1] + self._messages["."] if template.endswith(".") else template


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text into its first sentence and the rest."""
    ends = [at for end in (". ", "? ") if (at := text.find(end)) >= 0]
    return (text[: min(ends) + 1], text[min(ends) + 1 :]) if ends else (text, "")


@lru_cache
def _catalogue(language: str) -> Catalogue | None:
    file = LOCALES / language / "messages.json"
    return Catalogue(json.loads(file.read_text(encoding="utf-8"))) if language and file.is_file() else None
