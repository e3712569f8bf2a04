"""docs/reliability.md is what its result file says, and names tests that there are."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import reliability


def report(nodeid: str, **figures: object) -> pytest.TestReport:
    properties = [(f"{reliability.PREFIX}{what}", value) for what, value in figures.items()]
    return pytest.TestReport(nodeid, (nodeid, 0, ""), {}, "passed", None, "call", user_properties=properties)


def test_figures_are_taken_from_reports() -> None:
    kills = [report(f"tests/b.py::test_b[{n}]", kills="0 left behind") for n in range(3)]
    reports = [*kills, report("tests/a.py::test_a", runs=7), report("x")]
    assert reliability.found(reports) == [
        {"what": "runs", "figure": "7", "test": "tests/a.py::test_a"},
        {"what": "kills", "figure": "0 left behind in each of 3 cases", "test": "tests/b.py::test_b"},
    ]


def test_the_page_is_up_to_date(root: Path) -> None:
    file = reliability.latest()
    facts = json.loads(file.read_text(encoding="utf-8"))
    written = reliability.PAGE.read_text(encoding="utf-8")
    assert written == reliability.page(file.name, facts), "docs/reliability.md is not its result: run make reliability"
    for row in facts["figures"]:
        name, _, test = row["test"].partition("::")
        nodes = ast.walk(ast.parse((root / name).read_text(encoding="utf-8")))
        known = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert test in known, f"{row['test']} is no test any more: run make reliability"
