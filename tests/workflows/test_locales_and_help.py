"""Locales, help pages and translations cover every node, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import english_locale
import pytest
import translations
from comfyui_onediff_guard.headless.workflow import schema
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, inputs
from templates import read

ROOT = Path(__file__).resolve().parents[2]
LOCALES = sorted(path for path in (ROOT / "locales").iterdir() if path.is_dir())
HELP = ROOT / "web" / "docs"
ENGLISH = english_locale.texts()
PRIVATE_TERMS = re.compile(
    r"\b(wide|islands?|asked for|laid out like|planned like|reckon\w*|on paper|taught|stream in float32|halves apart|"
    r"drift(s|ed)?|not finite)\b",
    re.IGNORECASE,
)
SAMPLE_PROMPTS = {ROOT / "demo" / "small_tokenizer.py", ROOT / "pipelines" / "small_files.py"}
COMFYUI_LANGUAGES = {"ar", "en", "es", "fr", "ja", "ko", "ru", "tr", "zh", "zh-TW"}


def shape(texts: Any) -> Any:
    """The same nesting without the texts."""
    return {key: shape(value) for key, value in texts.items()} if isinstance(texts, dict) else str


def test_english_locale_matches_node_texts() -> None:
    stale = "locales/en is outdated: run make docs, and update the translations"
    assert english_locale.FILE.read_bytes() == english_locale.render().encode(), stale
    for name, node in NODE_CLASS_MAPPINGS.items():
        said, declared = ENGLISH[name], node.INPUT_TYPES()
        visible = declared["required"] | declared.get("optional", {})
        tips = {key: options["tooltip"] for key, (_, options) in visible.items()}
        assert (said["display_name"], said["description"]) == (NODE_DISPLAY_NAME_MAPPINGS[name], node.DESCRIPTION)
        assert {key: text["tooltip"] for key, text in said["inputs"].items()} == tips


@pytest.mark.parametrize("folder", LOCALES, ids=lambda path: path.name)
def test_locale_has_same_keys_as_english(folder: Path) -> None:
    assert folder.name in COMFYUI_LANGUAGES
    assert shape(read(folder / "nodeDefs.json")) == shape(ENGLISH)
    english = read(ROOT / "locales" / "en" / "main.json")
    assert shape(read(folder / "main.json")) == shape(english)
    parts = {part for node in NODE_CLASS_MAPPINGS.values() for part in node.CATEGORY.split("/")}
    assert set(english["nodeCategories"]) == parts
    settings = read(ROOT / "locales" / "en" / "settings.json")
    assert shape(read(folder / "settings.json")) == shape(settings)
    page = (ROOT / "web" / "every_workflow.js").read_text(encoding="utf-8")
    assert all(f'"{text}"' in page for text in texts(settings).values())


def texts(node: Any, path: str = "") -> dict[str, str]:
    if isinstance(node, str):
        return {path: node}
    return {key: text for name, child in node.items() for key, text in texts(child, f"{path}/{name}").items()}


@pytest.mark.parametrize("folder", LOCALES, ids=lambda path: path.name)
def test_translation_keeps_options_and_numbers(folder: Path) -> None:
    """Drop-down values are not translated, so that readers of a tooltip find them in the list."""
    options = (*inputs.PRECISIONS, inputs.INHERIT, *inputs.BACKENDS, *inputs.OFFLOADS, *inputs.ON_FAILURE)
    marked = re.compile(rf"\b(?:{'|'.join(map(re.escape, (*options, *inputs.SCHEDULERS)))})(?=[:：])|\d+")
    translated = texts(read(folder / "nodeDefs.json"))
    for path, text in texts(ENGLISH).items():
        assert translated[path].strip()
        wanted, found = (sorted(marked.findall(value)) for value in (text, translated[path]))
        assert found == wanted, f"{path}: {translated[path]}"


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_translation_uses_translated_node_and_input_names(language: str) -> None:
    """No English name of a renamed node or input is left. A drop-down value before a colon may be the same word."""
    folder = ROOT / "locales" / language
    shown = read(folder / "nodeDefs.json")
    nodes = {ENGLISH[node]["display_name"] for node in shown} - {node["display_name"] for node in shown.values()}
    inputs_ = {(key, text["name"].lower()) for node in shown.values() for key, text in node["inputs"].items()}
    renamed = {key for key, _ in inputs_} - {name for _, name in inputs_}
    english = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted({*nodes, *renamed}))})(?![\w.:：/-])")
    said = [*texts(shown).values(), *read(folder / "messages.json").values(), *read(folder / "settings.json").values()]
    assert renamed >= {"error", "check_every", "positive"} and nodes >= {"Step Cache", "NaN Guard"}
    assert not [text for text in map(str, said) if english.search(re.sub(r"`[^`]*`", "", text))]


def test_translations_are_up_to_date_with_english() -> None:
    assert {*translations.LANGUAGES, "en"} == {folder.name for folder in LOCALES}
    assert not translations.faults(), "translate what has changed, then run the command at each line's end"


def structure(page: str) -> tuple[object, ...]:
    """What a translation keeps: levels of headings, code in the first cells of tables, number of links, all code."""
    heads = [line.split()[0] for line in page.splitlines() if line.startswith("#")]
    code = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    cells = [re.findall(r"`([^`]+)`", line.split(" | ")[0]) for line in page.splitlines() if line.startswith("| `")]
    return heads, [name for cell in cells for name in cell], page.count("]("), set(re.findall(r"`([^`\n]+)`", code))


@pytest.mark.parametrize("language", translations.LANGUAGES)
@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_translated_help_page_has_same_structure_as_english(name: str, language: str) -> None:
    """It names inputs and outputs as the translated node shows them."""
    english, page = ((HELP / file).read_text(encoding="utf-8") for file in (f"{name}.md", f"{name}/{language}.md"))
    node = read(ROOT / "locales" / language / "nodeDefs.json")[name]
    assert page.startswith(f"# {node['display_name']}\n")
    assert structure(page) == structure(english)
    shown = [spec["name"].lower() for spec in (*node["inputs"].values(), *node["outputs"].values())]
    assert not [label for label in shown if label not in page.lower()]


@pytest.mark.parametrize("readme", sorted(ROOT.glob("README.*.md")), ids=lambda path: path.name)
def test_translated_readme_has_same_structure_as_english(readme: Path) -> None:
    english, translated = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", readme.name))
    assert structure(translated) == structure(english)
    links = [re.findall(r"\]\(([^)#\s]+)", page) for page in (translated, english)]
    assert [link for link in links[0] if link != "README.md"] == [link for link in links[1] if link != readme.name]
    titles = read(ROOT / "locales" / readme.name.split(".")[1] / "nodeDefs.json").values()
    assert all(f"| {node['display_name']} |" in translated for node in titles)


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_help_page_names_all_inputs_and_outputs_of_node(name: str) -> None:
    page = (HELP / f"{name}.md").read_text(encoding="utf-8")
    node = NODE_CLASS_MAPPINGS[name]
    assert page.startswith(f"# {NODE_DISPLAY_NAME_MAPPINGS[name]}\n")
    mentioned = set(re.findall(r"`([^`\n]+)`", page))
    described = schema.from_class(name, node)
    assert set(described.inputs) | set(node.RETURN_NAMES) <= mentioned


def _texts() -> Iterator[str]:
    """Texts of the page, the locale and the code: literals of several words but docstrings, and parts of f-strings."""
    yield from (path.read_text("utf-8") for path in (*(ROOT / "web").glob("*.js"), *HELP.glob("*.md")))
    for name in ("main.json", "nodeDefs.json", "settings.json"):
        yield from texts(read(ROOT / "locales" / "en" / name)).values()
    for package in ("comfyui_host", "demo", "headless", "nodes", "pipelines", "precision", "trust"):
        for path in {*(ROOT / package).rglob("*.py")} - SAMPLE_PROMPTS:
            nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            said = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
            yield from (n.value for n in said if isinstance(n.value, str) and " " in n.value)


def test_user_texts_contain_no_private_terms() -> None:
    """Docs may name a mechanism; nodes, reports, logs, errors and commands say what it does."""
    assert not [text for text in _texts() if PRIVATE_TERMS.search(text)]


def test_help_pages_match_nodes_and_languages() -> None:
    assert {path.stem for path in HELP.glob("*.md")} == set(NODE_CLASS_MAPPINGS)
    translated = {(path.parent.name, path.stem) for path in HELP.glob("*/*")}
    assert translated == set(product(NODE_CLASS_MAPPINGS, translations.LANGUAGES))
