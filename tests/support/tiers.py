"""Selects the tests of `make check`, `make test`, `make test-slow` and `make test-all`.

tests/tiers.toml lists what each target runs, by file and case, with a reason. A test that is not listed runs in
`make test-slow`. pytest without `--tier` runs all tests.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

TIERS = ("check", "test", "slow", "all")
VARIABLE = "ONEDIFF_GUARD_TIER"  # read by `by_tier` at import
FILE = Path(__file__).resolve().parents[1] / "tiers.toml"
SECTIONS: Mapping[str, Mapping[str, str]] = tomllib.loads(FILE.read_text(encoding="utf-8"))
LEG = re.compile(r"[\[-]leg_([a-z])[-\]]")


def by_tier(all_: int, fewer: int) -> int:
    """A number of examples: `all_` in `make test-all`, `fewer` in the other targets."""
    return all_ if os.environ.get(VARIABLE, "all") == "all" else fewer


def leg_of(node_id: str) -> str:
    """The letter of the ComfyUI (legs.py) that a test case runs in, "" if none."""
    found = LEG.search(node_id)
    return found[1] if found else ""


@cache
def _pattern(rule: str) -> re.Pattern[str]:
    text = re.escape(rule).replace(r"\*", ".*")
    return re.compile(text if rule.endswith("/") else rf"{text}(?=[:\[]|$)")


def fits(rule: str, node_id: str) -> bool:
    """Whether a line of the list matches the test: its folder, file, function or case; `*` matches any text."""
    return bool(_pattern(rule).match(node_id))


def listed(section: str, node_ids: Iterable[str]) -> set[str]:
    """The node ids that a section matches."""
    named = re.compile("|".join(_pattern(rule).pattern for rule in SECTIONS[section]) or "(?!)")
    return {name for name in node_ids if named.match(name)}


def selected(tier: str, node_ids: Iterable[str]) -> set[str]:
    """The node ids that a tier runs.

    check: section [check]. test: [check] and [test], without [slow]. slow: the remaining tests, without those in
    checkouts of ComfyUI and those in [all].
    """
    names = {*node_ids}
    if tier == "all":
        return names
    here = {name for name in names if leg_of(name) in ("", "a")}
    check = listed("check", here)
    test = check | listed("test", here) - listed("slow", here)
    return {"check": check, "test": test, "slow": here - test - listed("all", here)}[tier]


def axes(item: Any) -> tuple[str, dict[str, int]]:
    """The test of a collected case, and a number for its value on each axis. The names of one decorator form one axis.

    pytest's `callspec.indices` are not used: they number the cases.
    """
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    firsts = [re.split(r"\W+", names)[0] if isinstance(names, str) else names[0] for names in marks]
    values = getattr(getattr(item, "callspec", None), "params", {})
    return item.nodeid.partition("[")[0], {name: id(values[name]) for name in firsts if name in values}


def covering(cases: Iterable[tuple[str, str, Mapping[str, int]]]) -> set[str]:
    """A set of cases that covers every pair of values of two axes. `make test-slow` runs these for tests with three
    axes and more; `make test-all` runs the full product.

    cases: node id, test, and a number for the case's value on each axis.
    """
    chosen: set[str] = set()
    pairs_of: defaultdict[str, dict[str, set[object]]] = defaultdict(dict)
    for node_id, test, axes in cases:
        if len(axes) < 3:
            chosen.add(node_id)
        else:
            pairs_of[test][node_id] = {*combinations(sorted(axes.items()), 2)}
    for pairs in pairs_of.values():
        left = set[object]().union(*pairs.values())
        while left:
            best = max(pairs, key=lambda node_id: len(pairs[node_id] & left))
            chosen.add(best)
            left -= pairs.pop(best)
    return chosen


def files(tier: str) -> tuple[str, ...] | None:
    """The files and folders that hold a tier's tests; None if they can be anywhere."""
    if tier not in ("check", "test"):
        return None
    sections = ("check", "test") if tier == "test" else ("check",)
    return tuple({rule.partition("::")[0] for section in sections for rule in SECTIONS[section]})


def unmatched(tier: str, node_ids: Iterable[str]) -> set[str]:
    """Lines of the list that match no collected test."""
    names = [*node_ids]
    sections = {"check": ("check",), "test": ("check", "test", "slow")}.get(tier, tuple(SECTIONS))
    return {rule for section in sections for rule in SECTIONS[section] if not any(fits(rule, name) for name in names)}
