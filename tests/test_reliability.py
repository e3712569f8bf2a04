"""Figures of reliability are taken from the tests that measured them."""

from __future__ import annotations

import pytest
import reliability


def report(nodeid: str, **figures: object) -> pytest.TestReport:
    properties = [(f"{reliability.PREFIX}{what}", value) for what, value in figures.items()]
    return pytest.TestReport(nodeid, (nodeid, 0, ""), {}, "passed", None, "call", user_properties=properties)


def test_figures_are_taken_from_reports() -> None:
    kills = [report(f"tests/b.py::test_b[{n}]", kills="0 left behind") for n in range(3)]
    reports = [*kills, report("tests/a.py::test_a", runs=7), report("x")]
    assert reliability.found(reports) == [
        {"what": "runs", "figure": "7", "test": "tests/a.py::test_a"},
        {"what": "kills", "figure": "0 left behind in each of 3 cases", "test": "tests/b.py::test_b"},
    ]
