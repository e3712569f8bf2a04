"""docs/precision.md says what the tables say, and is up to date."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import precision_page as page
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, Architecture, by_capability, by_gfx
from comfyui_onediff_guard.precision.policy import Component, Plan, PlanImpossible, Precision, Variant, choose

PAGE = page.render()
DEVICES = (*ARCHITECTURES.values(), by_capability(5, 2), by_gfx("gfx9999"))
WHERE: dict[str, Callable[[Architecture], bool]] = {
    "everywhere": lambda a: True,
    "bf16 native": lambda a: a.bf16 == "native",
    "bf16 emulated": lambda a: a.bf16 == "emulated",
    "no bf16": lambda a: a.bf16 == "none",
    "fast fp16": lambda a: a.fast_fp16,
    "slow fp16": lambda a: not a.fast_fp16 and a.name != "sm75-gtx16",
    "wrong fp16": lambda a: a.name == "sm75-gtx16",
    "fp8 on NVIDIA": lambda a: a.fp8 and a.name.startswith("sm"),
    "int8": lambda a: a.name == "cpu" or (a.native_bf16 and a.name.startswith("sm")),
}


def is_in(words: str, device: Architecture) -> bool:
    """Whether a device is one of those that a cell names: one of WHERE, or "no" and one."""
    if words == "no native bf16":
        return device.bf16 != "native"
    return WHERE[words](device) if words in WHERE else not WHERE[words.removeprefix("no ")](device)


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


def models(cell: str) -> set[str]:
    trained_in = cell.removesuffix(" models")
    return {v.name for v in VARIANTS.values() if cell == "all" or v.trained_in == trained_in} or links(cell)


def anonymous(reason: str, device: Architecture, variant: Variant) -> str:
    return re.sub(rf"\b{re.escape(variant.name)}(?!\w|'s)", "this model", reason.replace(str(device), "this device"))


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


def test_reasons_stand_once_with_the_models_and_cards_that_they_are_true_of() -> None:
    ((_, auto),) = tables("Why")
    ((_, asked),) = tables("What the other values do")
    rows = [["`auto`", *row] for row in auto] + asked
    assert len({(row[0], row[2]) for row in rows}) == len(rows), "each reason once"
    mac = next(device.architecture for device in page._devices() if device.kind.endswith("macOS 14"))
    for device in (*DEVICES, mac):
        for variant in VARIANTS.values():
            for request in Precision:
                try:
                    plan = choose(device, variant, Component.DENOISER, request)
                    outcome = (plan.dtype, anonymous(plan.reason, device, variant))
                except PlanImpossible as refused:
                    said = str(refused).replace(f"; this is {device}.", ".")
                    outcome = ("*refused*", anonymous(said, device, variant))
                told = [
                    (runs_in, reason)
                    for value, runs_in, reason, names, where in rows
                    if value == f"`{request.value}`" and variant.name in models(names)
                    if all(is_in(words, device) for words in where.split(", "))
                ]
                assert told == [outcome]
