"""Tables of measurements for each family, written to the folder that `ONEDIFF_GUARD_TABLES=DIR` names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from native_models import CARD

Cells = dict[tuple[str, str], str]  # by family and state


def table(name: str, head: str, states: Sequence[str]) -> Any:
    """Return a fixture with the cells of a module's table. It is written on the CPU if all tests passed."""

    @pytest.fixture(scope="module")
    def cells(request: pytest.FixtureRequest) -> Iterator[Cells]:
        found: Cells = {}
        yield found
        folder = os.environ.get("ONEDIFF_GUARD_TABLES")
        if folder and CARD.type == "cpu" and not request.session.testsfailed:
            version = import_module("comfyui_version").__version__
            text = f"ComfyUI {version}. {head}\n\n{_markdown(found, states)}"
            (Path(folder) / f"native-{name}-{version}.md").write_text(text, encoding="utf-8")

    return cells


def figures(*values: float, between: str = " → ") -> str:
    return between.join("NaN" if math.isnan(value) else f"{value:.2g}" for value in values)


def _markdown(cells: Cells, states: Sequence[str]) -> str:
    families = dict.fromkeys(family for family, _ in cells)
    rows = [[family, *(cells.get((family, state), "–") for state in states)] for family in families]
    return "".join(f"| {' | '.join(row)} |\n" for row in (["family", *states], ["---"] * (1 + len(states)), *rows))
