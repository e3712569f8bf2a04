"""docs/reliability.md matches its result file and names existing tests."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import reliability


def test_reliability_page_matches_results_and_existing_tests(root: Path) -> None:
    file = reliability.latest()
    facts = json.loads(file.read_text(encoding="utf-8"))
    written = reliability.PAGE.read_text(encoding="utf-8")
    assert written == reliability.page(file.name, facts), "docs/reliability.md is outdated: run make reliability"
    for row in facts["figures"]:
        name, _, test = row["test"].partition("::")
        nodes = ast.walk(ast.parse((root / name).read_text(encoding="utf-8")))
        known = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert test in known, f"{row['test']} does not exist any more: run make reliability"
