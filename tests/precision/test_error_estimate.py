"""Decisions of the step cache, tested on plain numbers."""

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
    """The estimate after the first cacheable step, which was compared."""
    return estimate_of(at=FIRST).after_comparison(signal, error)


def run(known: ErrorEstimate, signal_of: Any, ratio: float = 1.0) -> tuple[ErrorEstimate, float]:
    """Follow each decision. Returns the final estimate and the real error of the cached steps."""
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
def test_extrapolation_weights_continue_a_polynomial(at: list[int]) -> None:
    def value(step: int) -> float:
        return sum((n + 1) * step**n for n in range(len(at)))

    weights = extrapolation_weights(at, 9)
    assert sum(weight * value(step) for weight, step in zip(weights, at, strict=True)) == pytest.approx(value(9))


@pytest.mark.parametrize("every", [2, 3, 5])
def test_first_last_and_every_nth_step_are_computed(every: int) -> None:
    known, _ = run(estimate_of(60, CachePolicy(1.0, every)), lambda _: 1e-5)
    assert min(known.cached) >= FIRST and max(known.cached) < 60 - LAST
    rows = "".join("x" if step in known.cached else " " for step in range(60)).split()
    assert {len(row) for row in rows[:-1]} == {every - 1}


@pytest.mark.parametrize(("steps", "error"), [*((steps, 0.1) for steps in range(1, FIRST + LAST + 2)), (20, 0.0)])
def test_short_runs_and_target_0_use_no_cache(steps: int, error: float) -> None:
    assert not run(estimate_of(steps, CachePolicy(error)), lambda _: 0.0)[0].cached


def test_no_step_is_cached_before_a_comparison() -> None:
    assert estimate_of(at=FIRST).choice() is CacheDecision.COMPUTE
    assert compared(0.0, 0.0).choice() is CacheDecision.COMPUTE  # gives no ratio
    assert compared(0.1, 0.0).choice() is CacheDecision.REUSE


def test_another_denoiser_is_compared_before_reuse() -> None:
    known = compared().after_reuse(0.01)
    another = known.with_another_denoiser()
    assert another.choice() is CacheDecision.COMPUTE and another.drift == known.drift > 0
    assert another.after_comparison(0.1, 0.9).settled == known.drift, "says nothing about the first denoiser"


@given(
    signals=st.lists(st.floats(0, 1), min_size=40, max_size=40),
    ratio=st.floats(0.01, 10),
    error=st.floats(0.001, 0.5),
    every=st.integers(2, 8),
)
def test_target_error_is_kept_if_errors_follow_signals(signals, ratio, error, every):
    """Except for one step whose signal was not as predicted."""
    known, added = run(estimate_of(40, CachePolicy(error, every)), lambda known: signals[known.at], ratio)
    assert GROWTH * added == pytest.approx(known.drift, abs=1e-6)
    assert known.drift <= error + GROWTH * CHANGE * ratio * max(signals)


@given(start=st.floats(1e-5, 1e-3), growth=st.floats(0.7, 1.0), every=st.integers(2, 6), steps=st.integers(8, 60))
def test_target_error_is_kept_for_predicted_signals(start: float, growth: float, every: int, steps: int) -> None:
    """Signals of a polynomial one order above the extrapolation, or smaller."""
    known, _ = run(
        estimate_of(steps, CachePolicy(0.01, every)),
        lambda known: start * growth ** min(known.at, 8) * known._departure(known.at),
    )
    assert known.drift <= 0.01


@pytest.mark.parametrize("cached", [(7,), (7, 8, 9), (5, 7, 8)])
def test_predicted_signal_is_exact_for_next_polynomial_order(cached: tuple[int, ...]) -> None:
    """For a polynomial one order above the extrapolation, from any measured step to the next one."""

    def off(step: int) -> float:
        taken = [each for each in range(step) if each not in cached][-ORDER - 1 :]
        weights = extrapolation_weights(taken, step)
        found = sum(weight * before ** (ORDER + 1) for weight, before in zip(weights, taken, strict=True))
        return found - step ** (ORDER + 1)

    for at in range(ORDER + 2, max(cached) + 4):
        known = estimate_of(at=at, cached=tuple(step for step in cached if step < at), latest=(at - 1, off(at - 1)))
        assert known.predicted_signal() == pytest.approx(off(at))


def test_next_comparison_corrects_error_of_cached_steps() -> None:
    known = compared().after_reuse(0.01).after_reuse(0.02)
    assert known.drift == pytest.approx(GROWTH * 0.015)
    worse = known.after_comparison(0.03, 0.06)
    assert worse.drift == worse.settled == pytest.approx(GROWTH * 0.03)
    assert not worse.open and worse.cached == known.cached and not worse.stopped
    computed = known.after_compute()  # its attempt failed: it says nothing about earlier steps
    assert computed.after_comparison(0.1, 9.0).settled == computed.settled == known.drift


def test_change_of_a_step_is_known_one_step_later() -> None:
    """Until then the change of the step before is used."""
    known = estimate_of(changes=())
    for change in (None, 0.3, 0.2):  # the first step has no measurement
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
        (lambda known: known.after_reuse(math.nan), "NaN or infinite", None),  # counts as predicted and ends caching
    ],
)  # fmt: skip
def test_conditions_that_stop_caching(end: Any, why: str, added: float | None) -> None:
    before = compared().after_reuse(0.01)
    known = end(before)
    assert known.stopped and why in known.stopped and not known.may_reuse
    if added is None:
        assert before.predicted_signal() > 0
        assert known.drift == pytest.approx(before.drift + GROWTH * before.predicted_signal() * CHANGE)
    else:
        assert known.drift == pytest.approx(added or before.drift)


@pytest.mark.parametrize(("drift", "over"), [(0.019, False), (0.02, False), (0.021, True)])
def test_estimate_over_target_gives_a_warning(drift: float, over: bool) -> None:
    use = CacheUse(0.02, 50, 25, 0.45, 20, drift, 0.001)
    assert bool(use.warning()) == over
    said = "changed the latents by an estimated 2.10%, more than the target of 2.00%: for a closer result, lower"
    assert said in use.warning() if over else "25 of 50" in str(use)
