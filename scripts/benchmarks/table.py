"""The tables of gpu.py and compiled.py, from their JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

GIB = 2**30
COLUMNS = (
    *("", "s a step", "× diffusers", "× by block", "× whole", "off fp32", "peak GiB", "floor / step"),
    *("cold compile s", "warm start s"),
)
END_TO_END = (
    *("", "encode s", "10 steps s", "decode s", "all s", "first s", "to card GiB", "back GiB", "waits", "peak GiB"),
)
SIDE_BY_SIDE = ("steps", "fp16", "stream", "rerun", "autotune", "layout", "offload")
Row = Mapping[str, Any]


def text(result: Mapping[str, Any]) -> str:
    """Return every model's tables, in Markdown."""
    lines = [f"{result['machine']}, torch {result['torch']}, diffusers {result['diffusers']}, {result['date']}"]
    for name, stages in result["models"].items():
        for stage in SIDE_BY_SIDE:
            if stage in stages:
                compiling = stages.get("compile", {}) if stage == "steps" else {}
                lines += ["", *_steps(f"{name}, {stage}", stages[stage], compiling)]
        if "compile" in stages and "steps" not in stages:
            lines += ["", f"{name}:", *_rows(COLUMNS, _cells({}, stages["compile"]))]
        if "end_to_end" in stages:
            lines += ["", *_end_to_end(name, stages["end_to_end"])]
        if "attention" in stages:
            lines += ["", f"{name}, attention:", *_attention(stages["attention"])]
        if "profile" in stages:
            lines += ["", f"{name}, profile: {stages['profile']}"]
        lines += [
            f"{name}, {stage}: {told}" for stage, found in stages.get("card", {}).items() if (told := _card(found))
        ]
    return "\n".join(lines)


def _steps(name: str, stage: Row, compiling: Row) -> list[str]:
    if "rows" not in stage:
        return [f"{name}: {stage['error']}"]
    reached, exact = stage["tflops"], stage["strict_fp32"]
    peak = "" if exact["stream_peak"] is None else f", in which the stream peaks at {exact['stream_peak']:.3g}"
    return [
        f"{name}, {stage['dtype']}, {stage['size']}, {stage['parameters'] / 1e6:.4g} M parameters, "
        f"{stage['rounds']} rounds. A step: {stage['tflop']:.4g} TFLOP, floor {stage['tflop'] / reached['used']:.4g} s "
        f"at {reached['used']:g} TFLOP/s ({reached['source']}; measured: {reached['measured']:g}); "
        f"{exact['seconds']:.4g} s in strict fp32{peak}",
        *_unfinished(stage),
        "",
        *_rows(COLUMNS, _cells(stage["rows"], compiling)),
    ]


def _unfinished(stage: Row) -> list[str]:
    return [f"NOT FINISHED: {stage['error']}"] if "error" in stage else []


def _cells(rows: Mapping[str, Row], compiling: Row) -> Iterable[list[str]]:
    for name in [*rows, *(name for name in compiling if name not in rows)]:
        row, cold = rows.get(name, {}), compiling.get(name, {})
        if "error" in row:
            yield [name, row["error"], *[""] * (len(COLUMNS) - 2)]
            continue
        peak = (row["weight_bytes"] + row["peak_bytes"]) / GIB if "peak_bytes" in row else None
        yield [
            name,
            _number(row.get("seconds"), ".4f"),
            _number(row.get("speed"), ".3f"),
            _number(row.get("speed_over_blocks"), ".3f"),
            _number(row.get("speed_over_whole"), ".3f"),
            _number(row.get("off_fp32"), ".5f"),
            _number(peak, ".3f"),
            _number(row.get("share_of_floor"), ".3f"),
            _compile(cold.get("cold")),
            _compile(cold.get("warm")),
        ]


def _end_to_end(name: str, stage: Row) -> list[str]:
    if "rows" not in stage:
        return [f"{name}, end to end: {stage['error']}"]
    cells = []
    for title, row in stage["rows"].items():
        if "error" in row:
            cells.append([title, row["error"], *[""] * (len(END_TO_END) - 2)])
            continue
        later, moves, peak = row["later"], row["moves"], row["peak_bytes"]
        found = [later.get("encode"), later["steps"], later["decode"], later["all"], row["first"]["all"]]
        cells.append(
            [
                title + ("" if row["finite"] else " (frames not finite)"),
                *(_number(seconds, ".3f") for seconds in found),
                *(_number(moves[way] / GIB, ".4f") for way in ("bytes_to_card", "bytes_to_host")),
                str(moves["waits"]),
                _number(None if peak is None else peak / GIB, ".3f"),
            ]
        )
    heading = f"{name}, end to end, {stage['dtype']}, {stage['size']}, {stage['steps']} steps:"
    return [heading, *_unfinished(stage), "", *_rows(END_TO_END, cells)]


def _card(found: Row | None) -> str:
    """Return the card's state before and after a stage."""
    states = [found.get(when) for when in ("before", "after")] if found else []
    known = [state for state in states if state]
    if not known:
        return ""
    ends = known[0], known[-1]

    def both(key: str) -> str:
        return " → ".join("?" if state[key] is None else f"{state[key]:g}" for state in ends)

    most = {key: "?" if known[0][key] is None else f"{known[0][key]:g}" for key in _MOST}
    return (
        f"driver {known[0]['driver']}, SM {both('sm_mhz')} of {most['sm_mhz_max']} MHz, memory {both('memory_mhz')} of "
        f"{most['memory_mhz_max']} MHz, {both('power_watts')} of {most['power_watts_limit']} W, {both('celsius')} °C"
    )


_MOST = ("sm_mhz_max", "memory_mhz_max", "power_watts_limit")


def _compile(found: Row | None) -> str:
    if found is None:
        return ""
    return found.get("error") or f"{found['seconds']:.1f} ({found['graphs']} graphs)"


def _attention(entries: Any) -> list[str]:
    if "error" in entries:
        return [entries["error"]]
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


def _number(value: float | str | None, form: str) -> str:
    """Format a number; texts stay unchanged."""
    return value or "" if isinstance(value, str | None) else format(value, form)
