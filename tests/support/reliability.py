"""docs/reliability.md: what the tests of faults, fuzzing, threads and servers measured, written by their own run.

`make reliability` runs them at their full depth and writes the figures of those that passed, with machine and date, to
scripts/benchmarks/results/, in place of what they came to earlier that day, and the page from that. A test has a figure
by calling the fixture of that name.
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
# Reliability: tests with faults, fuzzing, threads and long runs

<!-- Written by `make reliability` from scripts/benchmarks/results/{name}. Do not edit it here. -->

Each row is a result of a test that passed, on {machine}, {date}, torch {torch}, no GPU.
[SECURITY.md](../SECURITY.md) says what the pack promises, and what it does not.

| what was tested | result | test |
| --- | --- | --- |
"""


def found(reports: Iterable[pytest.TestReport]) -> list[dict[str, str]]:
    """The figures of passed tests, in the order of their files; one that several cases of a test share stands once."""
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
