"""Read the templates of the program's messages from the source. `python scripts/messages.py` adds missing templates to
each `locales/<language>/messages.json`, to be translated, and removes obsolete ones.

A template is the first argument of `Message` (trust/message.py), of an error for users, and the like, with numbered
fields. Of a message with several sentences, it is the first sentence.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from comfyui_onediff_guard.comfyui_host.language import JOINTS, first_sentence
from comfyui_onediff_guard.trust.message import numbered

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("ru", "zh")
PACKAGES = ("nodes", "comfyui_host", "pipelines", "precision")
TOLD_BY = ("BadInput", "Message", "Calls", "counted", "translated", "cls")  # besides errors; these take templates
_WORD = re.compile(r"[A-Za-z]{2}")


def _trees() -> dict[str, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}


def error_names(trees: dict[str, ast.Module]) -> set[str]:
    """Return the names of the error classes for users."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {"Told"}
    while more := {c.name for c in classes if found & {b.id for b in c.bases if isinstance(b, ast.Name)}} - found:
        found |= more
    return found - {"Told"}


def _said(trees: dict[str, ast.Module]) -> Iterator[ast.expr]:
    """Yield the template arguments of these calls: literals, and texts that are built at run time."""
    names = {*TOLD_BY, *error_names(trees)}
    for call in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in names and call.args:
            said = call.args[1:] if call.func.id == "counted" else call.args[:1]
            yield from (each for node in said for each in _branches(node))


def _branches(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.IfExp):
        return [*_branches(node.body), *_branches(node.orelse)]
    return [each for value in node.values for each in _branches(value)] if isinstance(node, ast.BoolOp) else [node]


@lru_cache
def templates() -> frozenset[str]:
    texts = {node.value for node in _said(_trees()) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    firsts = {first_sentence(numbered(text))[0] for text in texts}
    worded = {text for text in firsts if _WORD.search(re.sub(r"\{\d+\}", "", text))}
    return frozenset({*worded, *JOINTS, "."})


def made_at_run_time() -> list[str]:
    """Return f-strings and sums in place of a template: their parts are unknown, so they stay English."""
    lost = (ast.JoinedStr, ast.BinOp)
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in _said(_trees()) if isinstance(node, lost)]


def catalogue(language: str) -> dict[str, str]:
    file = ROOT / "locales" / language / "messages.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def main() -> None:
    for language in LANGUAGES:
        known = catalogue(language)
        kept = {text: known.get(text, "") for text in sorted(templates())}
        written = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
        (ROOT / "locales" / language / "messages.json").write_text(written, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
