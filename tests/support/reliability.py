"""docs/reliability.md: the figures of the fault, fuzzing, thread and server tests, written by their own run.

`make reliability` runs them at full depth. It writes the figures of passed tests, with machine and date, to
scripts/benchmarks/results/ (replacing earlier figures of that day), and the page from that file. A test records its
figures with the fixture `figure`.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "scripts" / "benchmarks" / "results"
PREFIX = "figure: "

HEAD = """\
# Reliability: results of fault, fuzzing and soak tests

<!-- Written by `make reliability` from scripts/benchmarks/results/{name}. Do not edit it here. -->

Each row is a result of a passed test: {machine}, {date}, torch {torch}, no GPU.
[SECURITY.md](../SECURITY.md) says what is promised and what is not.

| what was tested | result | test |
| --- | --- | --- |
"""


def collect_figures(reports: Iterable[pytest.TestReport]) -> list[dict[str, str]]:
    """The figures of passed tests, in the order of their files; a figure shared by several cases appears once."""
    counted = Counter(
        (report.nodeid.partition("[")[0], name.removeprefix(PREFIX), str(value))
        for report in reports
        for name, value in report.user_properties
        if name.startswith(PREFIX)
    )
    return [
        {"what": what, "figure": f"{value} in each of {times} cases" if times > 1 else value, "test": test}
        for (test, what, value), times in sorted(counted.items())
    ]


def result(figures: list[dict[str, str]]) -> dict[str, Any]:
    """The content of a result file."""
    import torch
    from measure import machine

    return {
        "benchmark": "reliability",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": machine(torch.device("cpu")),
        "torch": torch.__version__,
        "figures": figures,
    }


def latest() -> Path:
    """The newest result file."""
    return max(RESULTS.glob("reliability-cpu-*.json"))


def page(name: str, facts: Mapping[str, Any]) -> str:
    """docs/reliability.md. name: of the result file."""
    rows = (f"| {row['what']} | {row['figure']} | {_link(row['test'])} |\n" for row in facts["figures"])
    return HEAD.format(name=name, **facts) + "".join(rows)


def write(figures: list[dict[str, str]]) -> Path:
    """A result file, and the page from it."""
    from measure import write_json

    facts = result(figures)
    again = {row["test"] for row in figures}
    if (file := RESULTS / f"reliability-cpu-{facts['date']}.json").exists():
        earlier = json.loads(file.read_text(encoding="utf-8"))["figures"]
        facts["figures"] += [row for row in earlier if row["test"] not in again]
    facts["figures"].sort(key=lambda row: (row["test"], row["what"]))
    file = write_json(facts, RESULTS, "cpu")
    PAGE.write_text(page(file.name, facts), encoding="utf-8")
    return file


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})"
