"""What each make target runs: the list in tests/tiers.toml."""

from __future__ import annotations

import itertools

import pytest
import tiers

LINES = [(section, rule) for section, lines in tiers.SECTIONS.items() for rule in lines]


def test_every_test_runs_in_test_or_slow_or_needs_a_checkout_or_is_left_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert tiers.unfitting("test", ["tests/a.py::t", "tests/b.py::t[1]"]) == {"tests/b.py::*[2]"}
    assert tiers.unfitting("slow", ["tests/a.py::t"]) == {"tests/b.py", "tests/b.py::*[2]", "tests/c.py"}


@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize(("second", "goes_with_it"), [("a", 1), ("b", 2)])
@pytest.mark.parametrize("first", [1.5, 2.5])
def test_each_two_values_of_a_test_with_three_axes_meet(
    request: pytest.FixtureRequest, first: float, second: str, goes_with_it: int, third: int
) -> None:
    """Else `make test-slow` runs the product, or leaves out what nothing else runs."""
    items = [item for item in request.session.items if item.originalname == request.node.originalname]
    cases = [(item.nodeid, *tiers.axes(item)) for item in items]
    pairs = {pair for _, _, case in cases for pair in itertools.combinations(case.items(), 2)}
    chosen = tiers.covering([*cases, ("two", "two", {"model": 0, "mode": 0})])
    assert "two" in chosen and (len(cases) < 12 or len(chosen) <= 9)
    assert pairs == {pair for n, _, case in cases if n in chosen for pair in itertools.combinations(case.items(), 2)}


def test_each_line_says_what_it_would_catch_and_nothing_that_another_says() -> None:
    for (section, line), (inner_section, inner) in itertools.permutations(LINES, 2):
        if (section, inner_section) != ("test", "slow"):
            assert not tiers.fits(line, inner), f"{line} and {inner}"
    whole = tiers.SECTIONS["test"]
    assert not [rule for rule in tiers.SECTIONS["slow"] if not any(tiers.fits(line, rule) for line in whole)]
    assert not [rule for section, rule in LINES if len(tiers.SECTIONS[section][rule].split()) < 3]
