"""Find translations that are missing, or older than the English text. locales/sources.json records reviewed ones.

python scripts/translations.py                            # list missing and stale translations
python scripts/translations.py zh README.md 'nodes/*'     # record that these were reviewed, in this language
"""

from __future__ import annotations

import hashlib
import json
import sys
from fnmatch import fnmatch
from pathlib import Path

import english_locale
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("ru", "zh")
RECORD = ROOT / "locales" / "sources.json"


def translations(language: str) -> dict[str, tuple[str, Path]]:
    """Map each name to its English text and to the file that holds its translation."""
    locale = ROOT / "locales" / language
    found = {
        name: ((ROOT / "locales" / "en" / name).read_text("utf-8"), locale / name)
        for name in ("main.json", "settings.json")
    }
    for node, said in english_locale.texts().items():
        found[f"nodes/{node}"] = (json.dumps(said, ensure_ascii=False), locale / "nodeDefs.json")
    for node in NODE_CLASS_MAPPINGS:
        page = ROOT / "web" / "docs" / f"{node}.md"
        found[f"help/{node}"] = (page.read_text("utf-8"), page.with_suffix("") / f"{language}.md")
    if (readme := ROOT / f"README.{language}.md").exists():
        found["README.md"] = ((ROOT / "README.md").read_text("utf-8"), readme)
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def recorded() -> dict[str, dict[str, str]]:
    return json.loads(RECORD.read_text("utf-8"))


def faults() -> list[str]:
    """Return missing, stale and obsolete translations, one line each."""
    found = []
    for language in LANGUAGES:
        known, wanted = recorded().get(language, {}), translations(language)
        for name, (english, file) in wanted.items():
            where = f"{file.relative_to(ROOT).as_posix()}: {name}"
            if not file.exists():
                found.append(f"{where} is missing")
            elif known.get(name) != digest(english):
                found.append(f"{where}: the English has changed. python scripts/translations.py {language} {name}")
        found += [f"locales/sources.json: {language} has {name}, which is gone" for name in known.keys() - wanted]
    return found


def looked_at(language: str, patterns: list[str]) -> None:
    """Record that the translations of these names match the current English. Names that no longer exist are dropped."""
    known, wanted = recorded(), translations(language)
    before = known.get(language, {})
    known[language] = {
        name: digest(english) if any(fnmatch(name, pattern) for pattern in patterns) else before.get(name, "")
        for name, (english, _) in sorted(wanted.items())
    }
    RECORD.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        looked_at(sys.argv[1], sys.argv[2:])
    print("\n".join(faults()) or "All translations match the current English.")
