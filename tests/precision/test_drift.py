"""What a step cache decides, on plain numbers."""

from __future__ import annotations

import math

import pytest
from comfyui_onediff_guard.precision.drift import (
    FIRST,
    GROWTH,
    LAST,
    ORDER,
    CachePolicy,
    CacheUse,
    Choice,
    Ledger,
    coefficients,
)
from hypothesis import given
from hypothesis import strategies as st

POLICY = CachePolicy(error=0.1, check_every=3)
WEIGHT = 0.5


def ledger(steps: int = 20, policy: CachePolicy = POLICY, **more: object) -> Ledger:
    return Ledger(policy, steps, **more)  # pyright: ignore[reportArgumentType]


def run(book: Ledger, signals: list[float], ratio: float = 1.0) -> tuple[Ledger, float]:
    """Take each step as the ledger decides. Returns it, and what its cached steps really added."""
    added = 0.0
    while book.at < book.steps:
        signal = signals[book.at]
        if not book.may_reuse:
            book = book.computed(WEIGHT)
        elif book.choice() is Choice.REUSE:
            book = book.reused(signal, WEIGHT)
            added += ratio * signal * WEIGHT
        else:
            book = book.checked(signal, ratio * signal, WEIGHT)
    return book, added


@pytest.mark.parametrize("at", [[0, 1], [3, 5, 6], [0, 2, 3, 7]])
def test_a_polynomial_is_continued(at: list[int]) -> None:
    def value(step: int) -> float:
        return sum((n + 1) * step**n for n in range(len(at)))

    by = coefficients(at, 9)
    assert sum(factor * value(step) for factor, step in zip(by, at, strict=True)) == pytest.approx(value(9))


def test_the_first_and_the_last_steps_are_computed() -> None:
    book, _ = run(ledger(), [1e-5] * 20)
    assert book.cached
    assert min(book.cached) >= FIRST and max(book.cached) < 20 - LAST


@pytest.mark.parametrize("steps", range(1, FIRST + LAST + 2))
def test_a_run_of_few_steps_is_computed(steps: int) -> None:
    book, _ = run(ledger(steps), [1e-9] * steps)
    assert not book.cached


def test_nothing_is_cached_before_something_was_compared() -> None:
    book = ledger(at=FIRST, weight=WEIGHT)
    assert book.choice() is Choice.COMPUTE
    assert book.checked(0.0, 0.0, WEIGHT).choice() is Choice.COMPUTE  # from which no ratio follows
    assert book.checked(0.1, 0.0, WEIGHT).choice() is Choice.REUSE


def test_of_another_denoiser_something_is_compared_first() -> None:
    book = ledger(at=FIRST, weight=WEIGHT).checked(1e-4, 1e-4, WEIGHT)
    assert book.choice() is Choice.REUSE
    book = book.reused(0.01, WEIGHT)
    assert book.another().choice() is Choice.COMPUTE and book.another().drift == book.drift > 0
    assert book.another().checked(0.1, 0.9, WEIGHT).settled == book.drift, "which tells nothing of the first one"


@pytest.mark.parametrize("every", [2, 3, 5])
def test_so_many_steps_are_cached_in_a_row_at_most(every: int) -> None:
    book, _ = run(ledger(60, CachePolicy(1.0, every)), [1e-5] * 60)
    rows = "".join("x" if step in book.cached else " " for step in range(60)).split()
    assert {len(row) for row in rows[:-1]} == {every - 1}


def test_threshold_zero_caches_nothing() -> None:
    assert not run(ledger(policy=CachePolicy(0.0)), [0.0] * 20)[0].cached


@given(
    signals=st.lists(st.floats(0, 1), min_size=40, max_size=40),
    ratio=st.floats(0.01, 10),
    error=st.floats(0.001, 0.5),
    every=st.integers(2, 8),
)
def test_where_errors_follow_signals_the_budget_is_kept(
    signals: list[float], ratio: float, error: float, every: int
) -> None:
    """But for one step, whose signal was not as foreseen."""
    book, added = run(ledger(40, CachePolicy(error, every)), signals, ratio)
    assert GROWTH * added == pytest.approx(book.drift, abs=1e-6)
    assert book.drift <= error + GROWTH * WEIGHT * ratio * max(signals)


def test_what_cached_steps_added_is_reckoned_anew_by_the_next_comparison() -> None:
    book = ledger(at=FIRST, weight=WEIGHT).checked(0.1, 0.1, WEIGHT).reused(0.01, WEIGHT).reused(0.02, WEIGHT)
    assert book.drift == pytest.approx(GROWTH * 0.015)
    worse = book.checked(0.03, 0.06, WEIGHT)
    assert worse.drift == worse.settled == pytest.approx(GROWTH * 0.03)
    assert not worse.open and worse.cached == book.cached and not worse.stopped


@given(start=st.floats(1e-5, 1e-3), growth=st.floats(0.7, 1.0), every=st.integers(2, 6), steps=st.integers(8, 60))
def test_where_signals_are_as_foreseen_the_budget_is_kept(start: float, growth: float, every: int, steps: int) -> None:
    """As those of a polynomial of one order more than is extrapolated, or less than those."""
    book = ledger(steps, CachePolicy(0.01, every))
    while book.at < steps:
        signal = start * growth ** min(book.at, 8) * book._departs(book.at)
        if not book.may_reuse:
            book = book.computed(WEIGHT)
        elif book.choice() is Choice.REUSE:
            book = book.reused(signal, WEIGHT)
        else:
            book = book.checked(signal, signal, WEIGHT)
    assert book.drift <= 0.01


@pytest.mark.parametrize("cached", [(7,), (7, 8, 9), (5, 7, 8)])
def test_a_signal_is_foreseen_exactly_for_the_next_power(cached: tuple[int, ...]) -> None:
    """Of a polynomial of one order more than is extrapolated, from any step that was measured to the next one."""

    def off(step: int) -> float:
        taken = [each for each in range(step) if each not in cached][-ORDER - 1 :]
        by = coefficients(taken, step)
        found = sum(factor * before ** (ORDER + 1) for factor, before in zip(by, taken, strict=True))
        return found - step ** (ORDER + 1)

    for at in range(ORDER + 2, max(cached) + 4):
        book = ledger(at=at, cached=tuple(step for step in cached if step < at), latest=(at - 1, off(at - 1)))
        assert book.foreseen() == pytest.approx(off(at))


def test_what_no_comparison_follows_counts_in_full() -> None:
    """A step that was computed again, since its attempt failed, tells nothing of those before it."""
    book = ledger(at=FIRST, weight=WEIGHT).checked(0.1, 0.1, WEIGHT).reused(0.01, WEIGHT).computed(WEIGHT)
    assert not book.open and book.settled == pytest.approx(GROWTH * 0.005)
    assert book.checked(0.1, 9.0, WEIGHT).settled == book.settled


def test_a_spent_budget_ends_it() -> None:
    book = ledger(at=FIRST, weight=WEIGHT).checked(0.1, 0.1, WEIGHT).reused(0.01, WEIGHT).checked(0.01, 1.0, WEIGHT)
    assert book.drift == pytest.approx(GROWTH * 0.5)
    assert book.stopped and not book.may_reuse


@pytest.mark.parametrize("broken", [(math.nan, 0.1), (0.1, math.nan), (0.1, math.inf)])
def test_what_is_not_finite_ends_it(broken: tuple[float, float]) -> None:
    before = ledger(at=FIRST).checked(0.1, 0.1, WEIGHT).reused(0.01, WEIGHT)
    book = before.checked(*broken, WEIGHT)
    assert "not finite" in book.stopped and not book.may_reuse
    assert book.drift == before.drift


def test_a_cached_step_whose_signal_is_not_finite_counts_as_foreseen_and_is_the_last() -> None:
    before = ledger(at=FIRST, weight=WEIGHT).checked(1e-4, 1e-4, WEIGHT)
    book = before.reused(math.nan, WEIGHT)
    assert "not finite" in book.stopped and not book.may_reuse
    assert book.drift == pytest.approx(GROWTH * before.foreseen() * WEIGHT) and book.drift > 0


@pytest.mark.parametrize(("drift", "broken"), [(0.019, False), (0.02, False), (0.021, True)])
def test_a_broken_budget_is_said(drift: float, broken: bool) -> None:
    use = CacheUse(0.02, 50, 25, 0.45, 20, drift, 0.001)
    assert bool(use.warning()) == broken
    assert "2.1" in use.warning() if broken else "25 of 50" in str(use)
