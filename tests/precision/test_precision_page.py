"""docs/precision.md matches the precision tables and is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import precision_page as page
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, by_capability, by_gfx
from comfyui_onediff_guard.precision.policy import Component, Precision, choose

PAGE = page.render()
DEVICES = (*ARCHITECTURES.values(), by_capability(5, 2), by_gfx("gfx9999"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_committed_page_is_current_and_written_by_make_docs(root: Path, tmp_path: Path) -> None:
    committed = page.PAGE.read_bytes() if page.PAGE.exists() else b""
    assert committed == PAGE.encode(), "docs/precision.md does not match the tables: run make docs"
    page.main(tmp_path / "precision.md")
    assert (tmp_path / "precision.md").read_bytes() == committed and root / "docs" / "precision.md" == page.PAGE
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert makefile.split("\ndocs:", 1)[1].split("\n\n", 1)[0].endswith(f"python scripts/{page.__name__}.py")


def test_page_matrix_matches_auto() -> None:
    section = PAGE.split("## What `auto` chooses\n", 1)[1].split("\n##", 1)[0]
    titles, _, *rows = (cells(line) for line in section.splitlines() if line.startswith("|"))
    models = [set(re.findall(r"\[([^]]+)\]", title)) for title in titles]
    cards = [set(re.findall(r"`([^`]+)`", row[0])) for row in rows]
    assert set().union(*models) == set(VARIANTS) and set().union(*cards) | {"cpu"} == set(ARCHITECTURES)
    for device in DEVICES:
        kind = {"gfx9999": "any other device", "sm52": "older NVIDIA cards"}.get(device.name, device.label)
        (row,) = (row for row, its in zip(rows, cards, strict=True) if device.name in its or kind in row[0].split(", "))
        for variant in VARIANTS.values():
            plan = choose(device, variant, Component.DENOISER, Precision.AUTO)
            (column,) = (index for index, its in enumerate(models) if variant.name in its)
            assert row[column] == f"**{plan.dtype}{' protected' * plan.overflow_protection}**"
