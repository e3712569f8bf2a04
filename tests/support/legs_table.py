"""The table of ComfyUIs at the end of a run: tests in each, what came of them, why some were skipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

ORDER = ("passed", "skipped", "failed")  # a test that has several outcomes has the last of them
COUNTED = {"passed": "passed", "xpassed": "failed", "skipped": "skipped", "xfailed": "skipped"}
COUNTED |= {"failed": "failed", "error": "failed"}  # pytest's name → ours
LEG = re.compile(r"[\[-]leg_([a-z])[-\]]")


def leg_of(nodeid: str) -> str:
    """The letter of the leg that a case of a test runs in, "" of a test that runs in none."""
    found = LEG.search(nodeid)
    return found[1] if found else ""


def lines(stats: Mapping[str, Sequence[Any]], versions: Mapping[str, str]) -> Iterator[str]:
    """stats: pytest's name of an outcome → reports. versions: letter → ComfyUI's, "" where there is none."""
    came_of: dict[str, dict[str, str]] = {}  # letter → node id → outcome
    reasons: dict[str, Counter[str]] = {}
    for theirs, ours in sorted(COUNTED.items(), key=lambda names: ORDER.index(names[1])):
        for report in _of_legs(stats.get(theirs, ())):
            leg = leg_of(report.nodeid)
            came_of.setdefault(leg, {})[report.nodeid] = ours
            if ours == "skipped":
                reasons.setdefault(leg, Counter())[_reason(report)] += 1
    if not came_of:
        return
    yield _row("core", "tests", "passed", "failed", "skipped")
    for leg, outcomes in sorted(came_of.items()):
        counted = Counter(outcomes.values())
        core = f"({leg}) {versions.get(leg) or 'not found'}"
        yield _row(core, *map(str, (len(outcomes), counted["passed"], counted["failed"], counted["skipped"])))
    for leg, why in sorted(reasons.items()):
        yield from (f"skipped in ({leg}): {count}: {reason}" for reason, count in why.most_common())


def _of_legs(reports: Iterable[Any]) -> Iterator[Any]:
    return (report for report in reports if leg_of(getattr(report, "nodeid", "")))


def _reason(report: Any) -> str:
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")


def _row(core: str, *counts: str) -> str:
    return f"{core:<16}" + "".join(f"{count:>9}" for count in counts)
