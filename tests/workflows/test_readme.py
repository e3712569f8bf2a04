"""README.md names what there is: every file, node and exit code, and nothing that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from comfyui_onediff_guard.headless.errors import ExitCode
from comfyui_onediff_guard.headless.hosts.core_nodes import NODE_CLASS_MAPPINGS as CORE_NODES
from comfyui_onediff_guard.headless.workflow import schema
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, inputs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAYERS = ("comfyui_host", "headless", "nodes", "pipelines", "precision")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_file_map_has_a_sentence_for_every_file() -> None:
    mapped = {name for row in rows(section("File map"))[1:] for name in quoted(row[0])}
    files = {path.relative_to(ROOT).as_posix() for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    silent = {file for file in files if file.endswith("/__init__.py")}  # one docstring, but for the nodes' catalogue
    assert files - mapped <= silent
    for name in mapped:
        assert (ROOT / name).exists(), f"{name} is in the file map and nowhere else"


def test_every_workflow_is_in_the_table() -> None:
    named = {name for row in rows(section("Install"))[1:] for name in quoted(row[0])}
    assert named == {path.stem.removesuffix("_guarded") for path in (ROOT / "workflows").glob("*.json")}


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_the_node_table_has_every_input_and_output(name: str) -> None:
    row = next(row for row in rows(section("Nodes")) if row[0] == NODE_DISPLAY_NAME_MAPPINGS[name])
    described = schema.from_class(name, NODE_CLASS_MAPPINGS[name])
    assert re.findall(r"`([^`]+)`", row[2]) == list(described.inputs)
    assert re.findall(r"`([^`]+)`", row[3]) == list(NODE_CLASS_MAPPINGS[name].RETURN_NAMES)


def test_options_and_backends_are_in_their_tables() -> None:
    assert set(inputs.PRECISIONS) <= {row[0].strip("`") for row in rows(section("Precision"))}
    assert {row[0].strip("`") for row in rows(section("Compile backends"))[1:]} == set(inputs.BACKENDS) - {"auto"}


def test_exit_codes_and_core_nodes_are_named() -> None:
    text = section("Without a browser")
    assert {row[0] for row in rows(text)} >= {str(int(code)) for code in ExitCode}
    assert all(name in text for name in CORE_NODES)


def test_every_link_and_picture_is_there() -> None:
    targets = re.findall(r"\]\(([^)#\s]+)\)", README)
    assert targets
    for target in targets:
        assert target.startswith("https://") or (ROOT / target).exists(), target
