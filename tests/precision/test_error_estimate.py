"""What a step cache decides, on plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from comfyui_onediff_guard.precision.error_estimate import (
    FIRST,
    GROWTH,
    LAST,
    ORDER,
    CacheDecision,
    CachePolicy,
    CacheUse,
    ErrorEstimate,
    extrapolation_weights,
)
from hypothesis import given
from hypothesis import strategies as st

POLICY = CachePolicy(error=0.1, check_every=3)
CHANGE = 0.5


def estimate_of(steps: int = 20, policy: CachePolicy = POLICY, **more: Any) -> ErrorEstimate:
    return ErrorEstimate(policy, steps, **{"changes": (CHANGE,), **more})


def compared(signal: float = 0.1, error: float = 0.1) -> ErrorEstimate:
    """After the first step that could be cached, which was compared."""
    return estimate_of(at=FIRST).after_comparison(signal, error)


def run(known: ErrorEstimate, signal_of: Any, ratio: float = 1.0) -> tuple[ErrorEstimate, float]:
    """Take each step as it is decided. Returns what is known then, and what its cached steps really added."""
    added = 0.0
    while known.at < known.steps:
        signal = signal_of(known)
        if not known.may_reuse:
            known = known.after_compute()
        elif known.choice() is CacheDecision.REUSE:
            known = known.after_reuse(signal)
            added += ratio * signal * CHANGE
        else:
            known = known.after_comparison(signal, ratio * signal)
    return known, added


@pytest.mark.parametrize("at", [[0, 1], [3, 5, 6], [0, 2, 3, 7]])
def test_a_polynomial_is_continued(at: list[int]) -> None:
    def value(step: int) -> float:
        return sum((n + 1) * step**n for n in range(len(at)))

    weights = extrapolation_weights(at, 9)
    assert sum(weight * value(step) for weight, step in zip(weights, at, strict=True)) == pytest.approx(value(9))


@pytest.mark.parametrize("every", [2, 3, 5])
def test_steps_at_both_ends_and_every_so_many_th_are_computed(every: int) -> None:
    known, _ = run(estimate_of(60, CachePolicy(1.0, every)), lambda _: 1e-5)
    assert min(known.cached) >= FIRST and max(known.cached) < 60 - LAST
    rows = "".join("x" if step in known.cached else " " for step in range(60)).split()
    assert {len(row) for row in rows[:-1]} == {every - 1}


@pytest.mark.parametrize(("steps", "error"), [*((steps, 0.1) for steps in range(1, FIRST + LAST + 2)), (20, 0.0)])
def test_a_run_of_few_steps_or_with_a_target_of_0_is_computed(steps: int, error: float) -> None:
    assert not run(estimate_of(steps, CachePolicy(error)), lambda _: 0.0)[0].cached


def test_nothing_is_cached_before_something_was_compared() -> None:
    assert estimate_of(at=FIRST).choice() is CacheDecision.COMPUTE
    assert compared(0.0, 0.0).choice() is CacheDecision.COMPUTE  # from which no ratio follows
    assert compared(0.1, 0.0).choice() is CacheDecision.REUSE


def test_of_another_denoiser_something_is_compared_first() -> None:
    known = compared().after_reuse(0.01)
    another = known.with_another_denoiser()
    assert another.choice() is CacheDecision.COMPUTE and another.drift == known.drift > 0
    assert another.after_comparison(0.1, 0.9).settled == known.drift, "which tells nothing of the first one"


@given(
    signals=st.lists(st.floats(0, 1), min_size=40, max_size=40),
    ratio=st.floats(0.01, 10),
    error=st.floats(0.001, 0.5),
    every=st.integers(2, 8),
)
def test_where_errors_follow_signals_the_target_is_kept(signals, ratio, error, every):
    """But for one step, whose signal was not as predicted."""
    known, added = run(estimate_of(40, CachePolicy(error, every)), lambda known: signals[known.at], ratio)
    assert GROWTH * added == pytest.approx(known.drift, abs=1e-6)
    assert known.drift <= error + GROWTH * CHANGE * ratio * max(signals)


@given(start=st.floats(1e-5, 1e-3), growth=st.floats(0.7, 1.0), every=st.integers(2, 6), steps=st.integers(8, 60))
def test_where_signals_are_as_predicted_the_target_is_kept(start: float, growth: float, every: int, steps: int) -> None:
    """As those of a polynomial of one order more than is extrapolated, or less than those."""
    known, _ = run(
        estimate_of(steps, CachePolicy(0.01, every)),
        lambda known: start * growth ** min(known.at, 8) * known._departure(known.at),
    )
    assert known.drift <= 0.01


@pytest.mark.parametrize("cached", [(7,), (7, 8, 9), (5, 7, 8)])
def test_a_signal_is_predicted_exactly_for_the_next_power(cached: tuple[int, ...]) -> None:
    """Of a polynomial of one order more than is extrapolated, from any step that was measured to the next one."""

    def off(step: int) -> float:
        taken = [each for each in range(step) if each not in cached][-ORDER - 1 :]
        weights = extrapolation_weights(taken, step)
        found = sum(weight * before ** (ORDER + 1) for weight, before in zip(weights, taken, strict=True))
        return found - step ** (ORDER + 1)

    for at in range(ORDER + 2, max(cached) + 4):
        known = estimate_of(at=at, cached=tuple(step for step in cached if step < at), latest=(at - 1, off(at - 1)))
        assert known.predicted_signal() == pytest.approx(off(at))


def test_the_next_comparison_corrects_what_cached_steps_added() -> None:
    known = compared().after_reuse(0.01).after_reuse(0.02)
    assert known.drift == pytest.approx(GROWTH * 0.015)
    worse = known.after_comparison(0.03, 0.06)
    assert worse.drift == worse.settled == pytest.approx(GROWTH * 0.03)
    assert not worse.open and worse.cached == known.cached and not worse.stopped
    computed = known.after_compute()  # since its attempt failed: it tells nothing of those before it
    assert computed.after_comparison(0.1, 9.0).settled == computed.settled == known.drift


def test_what_a_step_changes_is_known_one_step_later() -> None:
    """Until then it counts as the one before."""
    known = estimate_of(changes=())
    for change in (None, 0.3, 0.2):  # of the first step nothing is measured
        known = known.with_change(change).after_compute()
    known = known.after_comparison(0.1, 0.1).with_change(0.4).after_reuse(0.01)
    assert known.drift == pytest.approx(GROWTH * 0.01 * 0.4)
    assert known.with_change(0.5).drift == pytest.approx(GROWTH * 0.01 * 0.5)
    assert known.with_change(None).drift == known.drift


@pytest.mark.parametrize(
    ("end", "why", "added"),
    [
        *((lambda known, it=it: known.with_change(it), "the latents", 0) for it in (math.nan, math.inf)),
        (lambda known: known.after_comparison(0.01, 1.0), "", GROWTH * 0.5),  # the target is reached
        *((lambda known, it=it: known.after_comparison(*it), "NaN or infinite", 0)
          for it in ((math.nan, 0.1), (0.1, math.nan), (0.1, math.inf))),
        (lambda known: known.after_reuse(math.nan), "NaN or infinite", None),  # it counts as predicted, and is the last
    ],
)  # fmt: skip
def test_what_ends_it(end: Any, why: str, added: float | None) -> None:
    before = compared().after_reuse(0.01)
    known = end(before)
    assert known.stopped and why in known.stopped and not known.may_reuse
    if added is None:
        assert before.predicted_signal() > 0
        assert known.drift == pytest.approx(before.drift + GROWTH * before.predicted_signal() * CHANGE)
    else:
        assert known.drift == pytest.approx(added or before.drift)


@pytest.mark.parametrize(("drift", "over"), [(0.019, False), (0.02, False), (0.021, True)])
def test_an_estimate_over_the_target_is_said(drift: float, over: bool) -> None:
    use = CacheUse(0.02, 50, 25, 0.45, 20, drift, 0.001)
    assert bool(use.warning()) == over
    said = "changed the latents by an estimated 2.10%, more than the target of 2.00%: for a closer result set a smaller"
    assert said in use.warning() if over else "25 of 50" in str(use)
