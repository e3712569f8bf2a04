"""How long something will take yet, as its node says it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from comfyui_onediff_guard.pipelines.pace import Pace


def said(total: float, *marks: tuple[float, float]) -> list[str]:
    """What is said at each of (amount done, seconds on the clock)."""
    clock: Iterable[float] = iter([seconds for _, seconds in marks])
    pace = Pace(lambda: next(clock))
    return [pace.left(done, total) for done, _ in marks]


def test_nothing_is_said_before_a_step_was_seen_and_at_the_end() -> None:
    assert said(3, (1, 10), (2, 12), (3, 14)) == ["", "2 s left", ""]


def test_the_first_step_which_compiles_does_not_count_once_others_follow() -> None:
    assert said(50, (0, 0), (1, 100), (2, 102), (3, 104)) == ["", "1.4 h left", "2 min left", "2 min left"]


def test_it_follows_steps_that_become_slower() -> None:
    marks = [(n, float(n)) for n in range(20)] + [(n, 20 + 10.0 * (n - 19)) for n in range(20, 40)]
    assert said(100, *marks)[19] == "1 min left" and said(100, *marks)[-1] == "10 min left"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.01, "1 s"), (59.4, "59 s"), (59.6, "1 min"), (3500, "58 min"), (3600, "1.0 h")]
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert said(2, (0, 0), (1, seconds))[-1] == f"{words} left"


def test_a_step_that_is_told_twice_is_one() -> None:
    clock = iter([0.0, 2.0, 4.0])
    pace = Pace(lambda: next(clock))
    assert [pace.left(done, 4) for done in (0, 1, 1, 2)] == ["", "6 s left", "6 s left", "4 s left"]
