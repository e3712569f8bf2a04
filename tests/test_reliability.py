"""docs/reliability.md is what its result file says, and names tests that there are."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import reliability


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
