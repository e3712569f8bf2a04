"""README.md and docs/ name every node, workflow and exit code, and only files and targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from comfyui_onediff_guard.headless.errors import ExitCode
from comfyui_onediff_guard.headless.hosts.core_nodes import NODE_CLASS_MAPPINGS as CORE_NODES
from comfyui_onediff_guard.headless.workflow import schema
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, inputs
from templates import TITLES

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("comfyui_host", "demo", "headless", "nodes", "pipelines", "precision", "trust", "scripts")
FOLDERS = {*LAYERS, "constraints", "docs", "locales", "subgraphs", "tests", "web", "workflows"}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
}
README = PAGES["README.md"]


def section(title: str, page: str = "README.md") -> str:
    return PAGES[page].split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", PAGES[page])


def anchors(page: str) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_readme_has_at_most_180_lines() -> None:
    assert len(README.splitlines()) <= 180


def test_readme_lists_every_workflow() -> None:
    listed = [(row[0], row[2].strip("`")) for row in rows(section("Workflows"))[1:]]
    assert listed == sorted((title.split(" - ")[0], name) for name, title in TITLES.items())


def test_readme_lists_every_node() -> None:
    assert sorted(row[0] for row in rows(section("Nodes at a glance"))[1:]) == sorted(
        NODE_DISPLAY_NAME_MAPPINGS.values()
    )


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_node_table_lists_every_input_and_output(name: str) -> None:
    row = next(row for row in rows(PAGES["docs/nodes.md"]) if row[0] == NODE_DISPLAY_NAME_MAPPINGS[name])
    described = schema.from_class(name, NODE_CLASS_MAPPINGS[name])
    assert re.findall(r"`([^`]+)`", row[2]) == list(described.inputs)
    assert re.findall(r"`([^`]+)`", row[3]) == list(NODE_CLASS_MAPPINGS[name].RETURN_NAMES)


@pytest.mark.parametrize("page", ["README.md", "docs/guard.md"])
def test_precision_table_lists_every_precision(page: str) -> None:
    assert set(inputs.PRECISIONS) <= {name for row in rows(section("Precision", page)) for name in quoted(row[0])}


def test_backend_table_lists_every_backend() -> None:
    backends = {row[0].strip("`") for row in rows(section("Compile backends", "docs/compile.md"))[1:]}
    assert backends == set(inputs.BACKENDS) - {"auto"}


def test_headless_page_names_exit_codes_and_core_nodes() -> None:
    text = section("Run a workflow", "docs/headless.md")
    assert {row[0] for row in rows(text)} >= {str(int(code)) for code in ExitCode}
    assert all(name in text for name in CORE_NODES)


def test_readme_and_guard_page_list_same_black_pictures() -> None:
    pages = ("README.md", "docs/guard.md")
    short, full = ([row[:2] for row in rows(section("The known black pictures", page))] for page in pages)
    assert short == full


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_and_anchors_exist(page: str) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        file = (ROOT / page).parent / target if target else ROOT / page
        if link.startswith("https://"):
            continue
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file.resolve().relative_to(ROOT).as_posix()), link


def test_every_page_is_reachable_from_readme() -> None:
    found, waiting = set[str](), ["README.md"]
    while waiting:
        page = waiting.pop()
        found.add(page)
        targets = [((ROOT / page).parent / link.partition("#")[0]).resolve() for link in links(page) if link[0] != "#"]
        names = {target.relative_to(ROOT).as_posix() for target in targets if target.is_relative_to(ROOT)}
        waiting += names & PAGES.keys() - found
    assert found >= PAGES.keys() - {"CHANGELOG.md"}


def paths(page: str) -> set[str]:
    """Quoted words that are paths of the repository: in one of its folders, or a test's file."""
    text = re.sub(r"<\w+>|\bNAME\b", "*", " ".join(quoted(PAGES[page])))  # placeholders
    words = {word.partition("::")[0].rstrip(".,:") for word in text.split()}
    return {
        word
        for word in words
        if ("/" in word and word.partition("/")[0] in FOLDERS) or re.fullmatch(r"test_\w+\.py", word)
    }


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"CHANGELOG.md"}))  # which names removed files
def test_quoted_paths_exist(page: str) -> None:
    for path in paths(page):
        where = ROOT.glob(path.rstrip("/")) if "/" in path else (ROOT / "tests").rglob(path)
        assert next(where, None), path


def test_quoted_tests_exist() -> None:
    quotes = re.findall(r"`(test_\w+)`", "".join(PAGES[page] for page in PAGES.keys() - {"CHANGELOG.md"}))
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in quotes if f"def {name}(" not in code] == []


@pytest.mark.parametrize("page", PAGES)
def test_quoted_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for text in quoted(PAGES[page]):
        if found := re.match(r"make ([a-z-]+)", text):
            assert found[1] in targets, text
