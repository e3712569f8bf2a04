"""docs/precision.md says what the tables say, and is up to date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import precision_page as page
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, by_capability, by_gfx
from comfyui_onediff_guard.precision.policy import Component, Plan, Precision, choose

PAGE = page.render()
DEVICES = (*ARCHITECTURES.values(), by_capability(5, 2), by_gfx("gfx9999"))


class Table(NamedTuple):
    titles: list[str]
    rows: list[list[str]]


def tables(title: str) -> list[Table]:
    """The tables below a heading, as cells."""
    section = re.split(r"\n##+ ", PAGE.split(f"# {title}\n", 1)[1])[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, flags=re.M)
    cells = [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]
    stripped = [[[cell.strip() for cell in row] for row in table] for table in cells]
    return [Table(titles, rows) for titles, _, *rows in stripped]


def links(cell: str) -> set[str]:
    return set(re.findall(r"\[([^]]+)\]", cell))


def codes(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def cell_of(plan: Plan) -> str:
    return f"{plan.dtype} protected" if plan.overflow_protection else plan.dtype


def test_the_committed_page_is_up_to_date_and_make_docs_writes_it(root: Path, tmp_path: Path) -> None:
    committed = page.PAGE.read_bytes() if page.PAGE.exists() else b""
    assert committed == PAGE.encode(), "docs/precision.md is not what the tables say: run make docs"
    page.main(tmp_path / "precision.md")
    assert (tmp_path / "precision.md").read_bytes() == committed and root / "docs" / "precision.md" == page.PAGE
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert makefile.split("\ndocs:", 1)[1].split("\n\n", 1)[0].endswith(f"python scripts/{page.__name__}.py")


def test_the_matrix_is_what_auto_chooses() -> None:
    ((titles, rows),) = tables("What `auto` chooses")
    assert set().union(*map(links, titles)) == set(VARIANTS)
    assert codes(" ".join(row[0] for row in rows)) | {"cpu"} == set(ARCHITECTURES)
    for device in DEVICES:
        kind = "any other device" if device.name == "gfx9999" else "older NVIDIA cards" if not device.known else ""
        (row,) = (row for row in rows if device.name in codes(row[0]) or (kind or device.label) in row[0].split(", "))
        for variant in VARIANTS.values():
            column = next(i for i, title in enumerate(titles) if variant.name in links(title))
            assert row[column] == f"**{cell_of(choose(device, variant, Component.DENOISER, Precision.AUTO))}**"
