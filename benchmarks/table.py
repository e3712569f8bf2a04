"""The tables of gpu.py and compiled.py, from their JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

GIB = 2**30
COLUMNS = ("", "s a step", "× diffusers", "× whole", "cold compile s", "warm start s", "peak GiB", "floor / step")
Row = Mapping[str, Any]


def text(result: Mapping[str, Any]) -> str:
    """Every model's tables, in Markdown."""
    lines = [f"{result['machine']}, torch {result['torch']}, diffusers {result['diffusers']}, {result['date']}"]
    for name, stages in result["models"].items():
        for stage in ("steps", "fp16", "rerun"):
            if stage in stages:
                lines += ["", *_steps(name, stages[stage], stages.get("compile", {}) if stage == "steps" else {})]
        if "compile" in stages and "steps" not in stages:
            lines += ["", f"{name}:", *_rows(COLUMNS, _cells({}, stages["compile"]))]
        if "attention" in stages:
            lines += ["", f"{name}, attention:", *_attention(stages["attention"])]
        if "profile" in stages:
            lines += ["", f"{name}, profile: {stages['profile']}"]
    return "\n".join(lines)


def _steps(name: str, stage: Row, compiling: Row) -> list[str]:
    if "error" in stage:
        return [f"{name}: {stage['error']}"]
    reached = stage["tflops"]
    floor = stage["tflop"] / reached["used"]
    return [
        f"{name}, {stage['dtype']}, {stage['size']}, {stage['parameters'] / 1e6:.4g} M parameters, "
        f"{stage['rounds']} rounds. A step: {stage['tflop']:.4g} TFLOP, floor {floor:.4g} s at {reached['used']:g} "
        f"TFLOP/s ({reached['source']}; measured: {reached['measured']:g})",
        "",
        *_rows(COLUMNS, _cells(stage["rows"], compiling, stage["weight_bytes"])),
    ]


def _cells(rows: Mapping[str, Row], compiling: Row, weights: int = 0) -> Iterable[list[str]]:
    for name in [*rows, *(name for name in compiling if name not in rows)]:
        row, cold = rows.get(name, {}), compiling.get(name, {})
        if "error" in row:
            yield [name, row["error"], *[""] * (len(COLUMNS) - 2)]
            continue
        peak = (weights + row["peak_bytes"]) / GIB if "peak_bytes" in row else None
        yield [
            name,
            _number(row.get("seconds"), ".4f"),
            _number(row.get("speed"), ".3f"),
            _number(row.get("speed_over_whole"), ".3f"),
            _compile(cold.get("cold")),
            _compile(cold.get("warm")),
            _number(peak, ".3f"),
            _number(row.get("share_of_floor"), ".3f"),
        ]


def _compile(found: Row | None) -> str:
    if found is None:
        return ""
    return found.get("error") or f"{found['seconds']:.1f} ({found['graphs']} graphs)"


def _attention(entries: Iterable[Row]) -> list[str]:
    cells = []
    for entry in entries:
        shape = "batch {}, {} heads, {} × {} tokens, {} channels".format(*entry["shape"])
        for name, row in entry["rows"].items():
            found = [_number(row.get("seconds"), ".5f"), _number(row.get("max_error"), ".2g")]
            cells.append([f"{shape}, {entry['dtype']}: {name}", *([row["error"], ""] if "error" in row else found)])
    return _rows(("", "s a call", "max error"), cells)


def _rows(columns: Iterable[str], cells: Iterable[list[str]]) -> list[str]:
    columns = list(columns)
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
