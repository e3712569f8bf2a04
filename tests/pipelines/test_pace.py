"""The remaining time of a run, as its node shows it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from comfyui_onediff_guard.pipelines.time_left import Pace


def shown(total: float, *marks: tuple[float, float]) -> list[str]:
    """The text at each of (amount done, seconds on the clock)."""
    clock: Iterable[float] = iter([seconds for _, seconds in marks])
    pace = Pace(lambda: next(clock))
    return [pace.left(done, total) for done, _ in marks]


def test_no_time_is_shown_before_first_step_ends_and_at_end() -> None:
    assert shown(3, (1, 10), (2, 12), (3, 14)) == ["", "2 s left", ""]


def test_first_step_does_not_count_once_others_follow() -> None:
    assert shown(50, (0, 0), (1, 100), (2, 102), (3, 104)) == ["", "1.4 h left", "2 min left", "2 min left"]


def test_remaining_time_follows_steps_that_become_slower() -> None:
    marks = [(n, float(n)) for n in range(20)] + [(n, 20 + 10.0 * (n - 19)) for n in range(20, 40)]
    assert shown(100, *marks)[19] == "1 min left" and shown(100, *marks)[-1] == "10 min left"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.01, "1 s"), (59.4, "59 s"), (59.6, "1 min"), (3500, "58 min"), (3600, "1.0 h")]
)
def test_durations_are_rounded_to_common_units(seconds: float, words: str) -> None:
    assert shown(2, (0, 0), (1, seconds))[-1] == f"{words} left"


def test_step_that_is_reported_twice_counts_once() -> None:
    clock = iter([0.0, 2.0, 4.0])
    pace = Pace(lambda: next(clock))
    assert [pace.left(done, 4) for done in (0, 1, 1, 2)] == ["", "6 s left", "6 s left", "4 s left"]
