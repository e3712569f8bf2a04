"""Which tests each make target runs, by the list in tests/tiers.toml."""

from __future__ import annotations

import itertools

import pytest
import tiers

LINES = [(section, rule) for section, lines in tiers.SECTIONS.items() for rule in lines]


def test_tiers_select_tests_and_report_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"check": {"tests/a.py": ""}, "test": {"tests/b.py": ""}, "slow": {"tests/b.py::*[2]": ""}}
    monkeypatch.setattr(tiers, "SECTIONS", lists | {"all": {"tests/c.py": ""}})
    names = {"tests/a.py::t", "tests/b.py::t[1]", "tests/b.py::t[2]", "tests/b.pyx::t", "tests/c.py::t"}
    names |= {"tests/b.py::t[2-3]", "tests/d.py::t[leg_a]"}
    checkouts = {"tests/a.py::t[leg_b]", "tests/d.py::t[leg_c]"}
    ran = {tier: tiers.selected(tier, names | checkouts) for tier in tiers.TIERS}
    assert ran["check"] == {"tests/a.py::t"}
    assert ran["test"] == {"tests/a.py::t", "tests/b.py::t[1]", "tests/b.py::t[2-3]"}
    assert ran["slow"] == {"tests/b.py::t[2]", "tests/b.pyx::t", "tests/d.py::t[leg_a]"}
    assert ran["all"] == names | checkouts
    assert tiers.unmatched("test", ["tests/a.py::t", "tests/b.py::t[1]"]) == {"tests/b.py::*[2]"}
    assert tiers.unmatched("slow", ["tests/a.py::t"]) == {"tests/b.py", "tests/b.py::*[2]", "tests/c.py"}


def test_tier_lines_do_not_overlap_and_have_reasons() -> None:
    for (section, line), (inner_section, inner) in itertools.permutations(LINES, 2):
        if (section, inner_section) != ("test", "slow"):
            assert not tiers.fits(line, inner), f"{line} and {inner}"
    test_lines = tiers.SECTIONS["test"]
    assert not [rule for rule in tiers.SECTIONS["slow"] if not any(tiers.fits(line, rule) for line in test_lines)]
    assert not [rule for section, rule in LINES if len(tiers.SECTIONS[section][rule].split()) < 3]
