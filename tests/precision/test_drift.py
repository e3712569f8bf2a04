"""What a step cache decides, on plain numbers."""

from __future__ import annotations

import math

import pytest
from comfyui_onediff_guard.precision.drift import (
    FIRST,
    GROWTH,
    LAST,
    LEAST,
    LEFT,
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
        elif book.choice(signal) is Choice.REUSE:
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
    assert book.choice(0.0) is Choice.COMPUTE
    assert book.checked(0.0, 0.0, WEIGHT).choice(0.0) is Choice.COMPUTE  # from which no ratio follows
    assert book.checked(0.1, 0.0, WEIGHT).choice(0.0) is Choice.REUSE


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
    book, added = run(ledger(40, CachePolicy(error, every)), signals, ratio)
    assert GROWTH * added == pytest.approx(book.drift, abs=1e-6)
    assert book.drift <= error


def test_what_cached_steps_added_is_reckoned_anew_by_the_next_comparison() -> None:
    book = ledger(at=FIRST, weight=WEIGHT).checked(0.1, 0.1, WEIGHT).reused(0.01, WEIGHT).reused(0.02, WEIGHT)
    assert book.drift == pytest.approx(GROWTH * 0.015)
    worse = book.checked(0.03, 0.06, WEIGHT)
    assert worse.drift == worse.settled == pytest.approx(GROWTH * 0.03)
    assert not worse.open and worse.cached == book.cached and not worse.stopped


def compared(signals: list[float]) -> tuple[Ledger, Ledger]:
    """After cached steps and a comparison with the last one of these signals: taken back, and not."""
    book = ledger(at=FIRST + 1, weight=WEIGHT).checked(0.1, 0.1, WEIGHT)
    for signal in signals[:-1]:
        book = book.reused(signal, WEIGHT)
    at = signals[-1]
    return book.checked(at, at, WEIGHT, corrected=True), book.checked(at, at, WEIGHT)


def test_of_what_was_taken_back_a_part_is_left() -> None:
    shares = ledger(at=FIRST + 4, cached=(5, 6), open=((0.0, 0.0),) * 2).shares
    better, without = compared([0.03 * shares[0], 0.03 * shares[1], 0.03])
    assert better.drift == better.settled == pytest.approx(LEFT * without.drift)
    assert better.reused(0.01, WEIGHT).drift == pytest.approx(better.settled + GROWTH * 0.01 * WEIGHT), "not yet"


@pytest.mark.parametrize(("signals", "left"), [((0.006, 0.024, 0.03), LEFT + 0.5), ((0.03, 0.03, 0.03), 1.0)])
def test_more_is_left_where_signals_do_not_grow_as_the_shares_do(signals: tuple[float, ...], left: float) -> None:
    """As those of a model whose steps are noise."""
    better, without = compared([*signals])
    assert better.drift == pytest.approx(left * without.drift)


@pytest.mark.parametrize("signal", [0.0, LEAST / 2])
def test_signals_of_rounding_take_nothing_back(signal: float) -> None:
    better, without = compared([0.01, 0.02, signal])
    assert better.drift == without.drift > 0


def test_what_no_comparison_follows_counts_in_full() -> None:
    """A step that was computed again, since its attempt failed, tells nothing of those before it."""
    book = ledger(at=FIRST, weight=WEIGHT).checked(0.1, 0.1, WEIGHT).reused(0.01, WEIGHT).computed(WEIGHT)
    assert not book.open and book.settled == pytest.approx(GROWTH * 0.005)
    assert book.checked(0.1, 9.0, WEIGHT, corrected=True).settled == book.settled


@pytest.mark.parametrize("cached", [(7,), (7, 8, 9), (5, 7, 8)])
def test_shares_are_exact_for_the_next_power(cached: tuple[int, ...]) -> None:
    """A polynomial of one order more than is extrapolated: what it is off by at a cached step, over what it is off by
    at the present one."""
    at = max(cached) + 1
    taken = [step for step in range(at) if step not in cached][-ORDER - 1 :]
    since = tuple((0.1, WEIGHT) for step in cached if step > max(taken))

    def off(step: int) -> float:
        by = coefficients(taken, step)
        return sum(factor * before ** (ORDER + 1) for factor, before in zip(by, taken, strict=True)) - step ** (
            ORDER + 1
        )

    book = ledger(at=at, cached=cached, open=since)
    assert book.shares == pytest.approx([off(step) / off(at) for step in cached if step > max(taken)])
    assert all(0 < share < 1 for share in book.shares)


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


@pytest.mark.parametrize(("drift", "broken"), [(0.019, False), (0.02, False), (0.021, True)])
def test_a_broken_budget_is_said(drift: float, broken: bool) -> None:
    use = CacheUse(0.02, 50, 25, 0.45, 20, drift, 0.001)
    assert bool(use.warning()) == broken
    assert "2.1" in use.warning() if broken else "25 of 50" in str(use)
