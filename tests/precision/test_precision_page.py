"""docs/precision.md says what the tables say, and is up to date."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import precision_page as page
import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.accumulation import SPECS, Accumulation, decide
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, Architecture, by_capability, by_gfx, detect
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


def test_it_is_written_without_torch_and_diffusers(root: Path, fresh_python: Callable[..., str]) -> None:
    code = f"""
import sys
sys.path.append({str(root / "scripts")!r})
sys.modules.update(torch=None, diffusers=None)
from {page.__name__} import render
sys.stdout.buffer.write(render().encode())
"""
    assert fresh_python(code, PYTHONIOENCODING="utf-8") == PAGE


def test_every_table_has_as_many_cells_in_each_row_and_no_row_twice() -> None:
    headings = re.findall(r"^##+ (.+)$", PAGE, flags=re.M)
    found = [table for heading in headings for table in tables(heading)]
    assert len(found) == 9
    for titles, rows in found:
        assert rows
        assert {len(row) for row in rows} == {len(titles)}
        assert len({tuple(row) for row in rows}) == len(rows)
        assert all(cell for row in rows for cell in row)


def test_every_link_leads_somewhere(root: Path) -> None:
    defined = dict(re.findall(r"^\[([^]]+)\]: (https://\S+)$", PAGE, flags=re.M))
    assert defined == {variant.name: variant.source for variant in VARIANTS.values()}
    body = PAGE.split("\n[CogVideoX-2B]: ")[0]
    assert set(re.findall(r"\[([^]]+)\](?!\()", body)) == set(defined)
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^##+ (.+)$", PAGE, re.M)
    }
    targets = set(re.findall(r"\]\(([^)]+)\)", body))
    inside = {target[1:] for target in targets if target.startswith("#")}
    pages = {target for target in targets if target.startswith("https://")}
    files = targets - pages - {f"#{anchor}" for anchor in inside}
    assert inside <= anchors
    assert pages and not [target for target in files if not (root / "docs" / target.partition("#")[0]).exists()]


def test_every_architecture_has_its_row_with_its_source() -> None:
    ((_, rows),) = tables("Cards")
    for name, row in ARCHITECTURES.items():
        cells = next(cells for cells in rows if name in codes(cells[1]))
        flags = ["yes" if flag else "–" for flag in (row.fast_fp16, row.fp16_tensor_cores, row.tf32, row.fp8)]
        assert cells[0] == row.label
        assert cells[2:8] == [row.bf16, *flags, row.half_accumulation]
        assert cells[8] == ("GeForce" if row.fp16_sums == "geforce" else "no")
        assert f"({row.source})" in cells[9]


def test_a_mac_before_macos_14_is_shown_as_it_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: False)
    mac = detect(torch.device("mps"))
    row = next(row for row in tables("Cards")[0].rows if row[0] == mac.label)
    assert row[2] == mac.bf16 == "none"


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


def test_the_other_components_are_told_as_they_run_in_fp16() -> None:
    ((_, rows),) = tables("The other components")
    told = {component: cells for names, *cells in rows for component in names.split(", ")}
    assert len(told) == sum(len(row[0].split(", ")) for row in rows) == len(Component) - 1
    for device in DEVICES:
        for variant in VARIANTS.values():
            for component in set(variant.components) - {Component.DENOISER}:
                plans = [choose(device, variant, component, asked) for asked in (Precision.FP16, Precision.FP16_PLAIN)]
                assert told[component.words] == [cell_of(plan) for plan in plans]
                assert all(
                    "on in every layer: " in plan.overflow_protection_reason
                    for plan in plans
                    if plan.overflow_protection
                )
                auto, denoiser = (choose(device, variant, c, Precision.AUTO) for c in (component, Component.DENOISER))
                assert auto.dtype == denoiser.dtype, "as the text above says"
                assert auto.dtype != "fp16" or cell_of(auto) == told[component.words][0]


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


def test_guard_and_stream_are_told_for_every_model_in_every_dtype() -> None:
    ((_, rows),) = tables("Guard and overflow protection")
    for variant in VARIANTS.values():
        for request in (Precision.BF16, Precision.FP16, Precision.FP16_PLAIN, Precision.FP32):
            for device in (ARCHITECTURES["sm80"], ARCHITECTURES["sm61"]):
                plan = choose(device, variant, Component.DENOISER, request)
                reasons = [
                    anonymous(reason, device, variant)
                    for reason in (plan.guard_reason, plan.overflow_protection_reason)
                ]
                told = [row[1:3] for row in rows if row[0] == request.value and variant.name in models(row[3])]
                assert told == [reasons]


def test_accumulation_is_told_by_card_and_every_switch_by_value() -> None:
    verdicts, switches = tables("Half-precision accumulation")
    by_reason = {(row[0], row[2]): row for row in verdicts.rows}
    for device in DEVICES:
        for request in Accumulation:
            decision = decide(device, request)
            row = by_reason[f"`{request.value}`", decision.reason.replace(str(device), "this device")]
            assert row[1] == decision.mode.value
            assert f"({decision.source})" in row[4]
            named = device.name in codes(row[3])
            assert named != row[3].startswith("everywhere")
            (column,) = (
                index
                for index, title in enumerate(switches.titles)
                if request.value in codes(title) and title.endswith(f": {decision.mode.value}")
            )
            for spec in SPECS:
                value = next(cells for cells in switches.rows if cells[0] == f"`{spec.name}`")[column]
                assert value == spec.values.get(decision.mode, "left")
