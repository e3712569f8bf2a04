"""What the program says, in the language of the user's page.

Messages are written in English where they are raised or told. `locales/<language>/messages.json` maps their templates,
in which `{0}` and `{1}` stand for what is filled in, to translations; `tools/messages.py` reads the templates off the
source. What a text is made of is found by its template, and put together again in the language. What has no template
stays as it is. Without ComfyUI, and where its page is in English, everything does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

LOCALES = Path(__file__).resolve().parents[1] / "locales"
JOINTS = ("; ", ", ", ": ", " · ", " → ")  # between the parts of a line; their translations are in the catalogue too
SETTINGS = ("Comfy.Locale", "OneDiffGuard.Language")  # what the user chose, else what the page takes (web/language.js)
_PACKAGE = __name__.removesuffix(".comfyui_host.language")
_HOLE = re.compile(r"\{\d+\}")
_WORDS = 10  # characters
_BETWEEN_JOINTS = f"((?:(?!{'|'.join(JOINTS)}).)*?)"  # what is filled into a part of a line
_MOST_JOINTS = 40  # of a line; longer ones are no status
_MOST = 2000  # characters that are looked at: who names a model could make matching take long


def page_language() -> str:
    """The language of ComfyUI's page: "zh", "ru" and so on; "" where none is known, or no ComfyUI."""
    folder_paths = sys.modules.get("folder_paths") or sys.modules.get("comfy.cmd.folder_paths")
    user = getattr(folder_paths, "get_user_directory", None)  # 0.0.1 has none
    if user is None:
        return ""
    settings = Path(user()) / "default" / "comfy.settings.json"
    try:
        return _chosen(settings, settings.stat().st_mtime_ns)
    except (OSError, ValueError):
        return ""


@lru_cache(maxsize=1)
def _chosen(settings: Path, _changed: int) -> str:
    held = json.loads(settings.read_text(encoding="utf-8"))
    chosen = [held.get(setting) for setting in SETTINGS] if isinstance(held, dict) else []
    return next((each for each in chosen if isinstance(each, str) and each.isalpha()), "")


def translated(text: str) -> str:
    """A status or a report, line by line, in the page's language."""
    catalogue = _catalogue(page_language())
    return "\n".join(map(catalogue.line, text.split("\n"))) if catalogue else text


def with_first_sentence_translated(message: str) -> str:
    """An error's message, which begins in the page's language and goes on in English."""
    catalogue = _catalogue(page_language())
    return catalogue.first_sentence(message) if catalogue else message


@contextmanager
def speaking() -> Generator[None]:
    """Have errors of this pack that leave the block begin in the page's language."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(f"{_PACKAGE}.") and error.args and isinstance(error.args[0], str):
            error.args = (with_first_sentence_translated(error.args[0]), *error.args[1:])
        raise


class Catalogue:
    """The templates of one language, those with the most text of their own first."""

    def __init__(self, messages: dict[str, str]):
        self._joints = {joint: messages.get(joint, joint) for joint in (*JOINTS, ".")}
        templates = sorted(messages.keys() - self._joints.keys(), key=lambda each: (-len(_HOLE.sub("", each)), each))
        self._sentences = [(_sentence(template), messages[template]) for template in templates]
        self._parts = [(_part(template), messages[template]) for template in templates]
        self.line = lru_cache(maxsize=512)(self._line)

    def first_sentence(self, message: str) -> str:
        for pattern, translation in self._sentences:
            if found := pattern.match(message, 0, _MOST):
                end = found.end()
                if end == len(message) or message[end].isspace():
                    return self._filled(translation, found) + message[end:]
        return message

    def _line(self, text: str) -> str:
        if (bare := text.strip()) != text:
            return text.replace(bare, self.line(bare)) if bare else text
        whole = self._whole(text)
        if whole is not None:
            return whole
        body, end = (text[:-1], self._joints["."]) if text.endswith(".") else (text, "")
        parts = re.split(f"({'|'.join(JOINTS)})", body)
        if len(parts) > 2 * _MOST_JOINTS:
            return text
        made, at, known = "", 0, False
        while at < len(parts):
            until, part = self._longest(parts, at)
            if made:
                joint = parts[at - 1]
                made += self._joints[joint] if known or part is not None else joint
            made, known = made + ("".join(parts[at:until]) if part is None else part), part is not None
            at = until + 1
        return made + (end if known else text[len(body) :])

    def _longest(self, parts: list[str], at: int) -> tuple[int, str | None]:
        """Up to where parts from `at` on are one template, and its translation; the next part alone where none is."""
        for until in range(len(parts), at, -2):
            if (part := self._whole("".join(parts[at:until]))) is not None:
                return until, part
        return at + 1, None

    def _whole(self, text: str) -> str | None:
        for pattern, translation in self._parts if len(text) <= _MOST else ():
            if found := pattern.fullmatch(text):
                return self._filled(translation, found)
        return None

    def _filled(self, translation: str, found: re.Match[str]) -> str:
        return _HOLE.sub(lambda hole: self._line(found[int(hole[0][1:-1]) + 1] or ""), translation)


def _sentence(template: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, _HOLE.split(template))))


def _part(template: str) -> re.Pattern[str]:
    """What is filled in holds no joint, unless words of the template stand on both sides of it."""
    first, *more = map(re.escape, _HOLE.split(template))
    between = "(.*?)" if len(template) - template.rfind("}") > _WORDS else _BETWEEN_JOINTS
    holes = [between if first else _BETWEEN_JOINTS, *[between] * len(more)]
    return re.compile(first + "".join(hole + text for hole, text in zip(holes, more, strict=False)))


@lru_cache
def _catalogue(language: str) -> Catalogue | None:
    file = LOCALES / language / "messages.json"
    return Catalogue(json.loads(file.read_text(encoding="utf-8"))) if language and file.is_file() else None
