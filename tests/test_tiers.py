"""What each make target runs: the list in tests/tiers.toml."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import tiers

LINES = [(section, rule) for section, lines in tiers.SECTIONS.items() for rule in lines]


@pytest.mark.parametrize(
    ("rule", "node_id", "named"),
    [
        ("tests/trust/", "tests/trust/test_text.py::test_a", True),
        ("tests/a/test_b.py", "tests/a/test_b.py::test_c[1]", True),
        ("tests/a/test_b.py", "tests/a/test_b.pyx::test_c", False),
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c", True),
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c[1]", True),
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_cd", False),
        ("tests/a/test_b.py::test_c[1]", "tests/a/test_b.py::test_c[1]", True),
        ("tests/a/test_b.py::test_c[1]", "tests/a/test_b.py::test_c[1-2]", False),
    ],
)
def test_a_line_names_a_folder_a_file_a_test_or_a_case(rule: str, node_id: str, named: bool) -> None:
    assert tiers.fits(rule, node_id) is named


def test_every_test_runs_in_test_or_slow_or_needs_a_checkout_or_is_left_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"check": {"tests/a.py": ""}, "test": {"tests/b.py": ""}, "slow": {"tests/b.py::t[2]": ""}}
    monkeypatch.setattr(tiers, "SECTIONS", lists | {"all": {"tests/c.py": ""}})
    names = {"tests/a.py::t", "tests/b.py::t[1]", "tests/b.py::t[2]", "tests/c.py::t", "tests/d.py::t[leg_a]"}
    checkouts = {"tests/a.py::t[leg_b]", "tests/d.py::t[leg_c]"}
    ran = {tier: tiers.selected(tier, names | checkouts) for tier in tiers.TIERS}
    assert ran["check"] == {"tests/a.py::t"}
    assert ran["test"] == {"tests/a.py::t", "tests/b.py::t[1]"}
    assert ran["slow"] == {"tests/b.py::t[2]", "tests/d.py::t[leg_a]"}
    assert ran["all"] == names | checkouts
    assert tiers.unfitting("test", ["tests/a.py::t", "tests/b.py::t[1]"]) == {"tests/b.py::t[2]"}
    assert tiers.unfitting("slow", ["tests/a.py::t"]) == {"tests/b.py", "tests/b.py::t[2]", "tests/c.py"}


def test_each_two_values_of_a_test_with_three_axes_meet() -> None:
    axes = {"model": 3, "mode": 2, "precision": 4}
    product = [dict(zip(axes, each, strict=True)) for each in itertools.product(*map(range, axes.values()))]
    cases = [(f"t[{n}]", "t", case) for n, case in enumerate(product)]
    chosen = tiers.covering([*cases, ("two[0]", "two", {"model": 0, "mode": 0}), ("none", "none", {})])
    assert {"two[0]", "none"} <= chosen and len(chosen) - 2 <= 16 < len(product) == 24
    pairs = {pair for case in product for pair in itertools.combinations(case.items(), 2)}
    assert pairs == {pair for n, _, case in cases if n in chosen for pair in itertools.combinations(case.items(), 2)}


@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize(("second", "goes_with_it"), [("a", 1), ("b", 2)])
@pytest.mark.parametrize("first", [1.5, 2.5])
def test_pytests_cases_have_their_values_on_their_axes(
    request: pytest.FixtureRequest, first: float, second: str, goes_with_it: int, third: int
) -> None:
    """Else each case meets no other, and `make test-slow` runs the product."""
    cases = [tiers.axes(item)[1] for item in request.session.items if item.originalname == request.node.originalname]
    numbers = {name: len({case[name] for case in cases}) for name in cases[0]}
    assert numbers == {"first": 2, "second": 2, "third": 3}


def test_no_line_says_again_what_another_says() -> None:
    for (section, line), (inner_section, inner) in itertools.permutations(LINES, 2):
        if (section, inner_section) != ("test", "slow"):
            assert not tiers.fits(line, inner), f"{line} and {inner}"


def test_what_is_left_out_of_make_test_would_be_in_it() -> None:
    whole = tiers.SECTIONS["test"]
    assert not [rule for rule in tiers.SECTIONS["slow"] if not any(tiers.fits(line, rule) for line in whole)]


def test_each_line_says_what_it_would_catch() -> None:
    assert not [rule for section, rule in LINES if len(tiers.SECTIONS[section][rule].split()) < 3]


def test_the_list_grows_with_a_line_in_the_changelog(root: Path, tests_in_make_test: int) -> None:
    """It grew from 7 to 40 minutes when every new test joined it."""
    told = tiers.last_count((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert tests_in_make_test <= told * tiers.GROWTH, (
        f"`make test` runs {tests_in_make_test} tests, CHANGELOG.md says {told}. Leave new ones to `make test-slow`, "
        f"or say why in CHANGELOG.md: '`make test` runs {tests_in_make_test:,} tests: …'"
    )
